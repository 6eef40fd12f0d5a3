"""Block-wise float8: its arithmetic, its parts from several trainer ranks, and updates of an engine with such weights.

Functions with a leading underscore run on all ranks.
"""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tidemill_testing import run_ranks
from tidemill_weight_update import LocalShard, WeightUpdater
from tidemill_weight_update.fp8 import BLOCK, FP8, BlockFp8
from torch import Tensor, nn
from toy_engines import ToyEngine

NAME = "model.layers.0.mlp.up_proj.weight"
SCALE = f"{NAME}_scale_inv"
SHAPES = [(512, 256), (300, 200), (130, 5), (100, 700)]


def matrix(shape: tuple[int, int], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator)
    values[:BLOCK, :BLOCK] = 0
    return values


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    (_, result), (_, scales) = BlockFp8([(NAME, values)]).quantize()
    return result, scales


def expected(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize block by block."""
    rows, cols = values.shape
    result = torch.empty(values.shape, dtype=FP8)
    scales = torch.empty(math.ceil(rows / BLOCK), math.ceil(cols / BLOCK))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            block = values[at].float()
            scales[i, j] = block.abs().max() / 448 if block.any() else 1.0
            result[at] = (block / scales[i, j]).to(FP8)
    return result, scales


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.view(torch.uint8).equal(b.view(torch.uint8))


def test_named_tensors_are_what_update_takes():
    values = matrix((130, 5))
    (name, result), (scale_name, _) = BlockFp8(lambda: iter([(NAME, values)])).quantize()
    assert (name, scale_name) == (NAME, SCALE)
    assert same_bits(result, quantized(values)[0])
    with pytest.raises(TypeError, match=r"for a dict pass \.items\(\)"):
        BlockFp8({NAME: values})
    with pytest.raises(ValueError, match="passed twice"):
        BlockFp8([(NAME, values)] * 2)


def test_block_whose_scale_is_rounded_to_zero_has_scale_one():
    result, scales = quantized(torch.full((2, 2), 1e-44))
    assert (scales.item(), result.float().sum().item()) == (1.0, 0.0)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 9), st.sampled_from([torch.bfloat16, torch.float32]))
def test_each_block_has_its_scale(rows, cols, seed, dtype):
    values = matrix((rows, cols), seed).to(dtype)
    (found, scales), (wanted, wanted_scales) = quantized(values), expected(values)
    assert same_bits(found, wanted)
    assert torch.equal(scales, wanted_scales)
    restored = found.float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :cols]
    largest = scales.max() * 448
    assert (restored - values.float()).abs().max() <= largest / 28  # half a step of 3 mantissa bits below 448


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 12288)])
def test_gpu_quantizes_as_the_cpu(shape, dtype):
    values = matrix(shape).to(dtype)
    values[-1, -1] = float("nan")
    for given_on_gpu in (values.cuda(), values.t().contiguous().cuda().t(), values.repeat(1, 2).cuda()[:, : shape[1]]):
        matrices, scales = zip(quantized(values), quantized(given_on_gpu), strict=True)
        assert torch.equal(matrices[1].float().cpu().nan_to_num(7), matrices[0].float().nan_to_num(7))
        assert torch.equal(scales[1].cpu().nan_to_num(7), scales[0].nan_to_num(7))


def _placed(layout: str, values: Tensor) -> list[Tensor | LocalShard]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rank = dist.get_rank()
    if layout == "shards":  # as tensor parallelism over columns gives them
        cols = BLOCK * math.ceil(values.shape[1] / 4 / BLOCK)
        at = rank * cols
        part = values[:, at : at + cols].contiguous()
        return [LocalShard(tensor=part, global_shape=tuple(values.shape), start=(0, at))] if part.numel() else []
    if layout in ("rows", "columns"):
        return [distribute_tensor(values, init_device_mesh("cpu", (4,)), [Shard(int(layout == "columns"))])]
    placements = {"both": [Shard(0), Shard(1)], "nested": [Shard(0), Shard(0)], "hybrid": [Replicate(), Shard(0)]}
    return [distribute_tensor(values, init_device_mesh("cpu", (2, 2)), placements[layout])]


LAYOUTS = ["rows", "columns", "both", "nested", "hybrid", "shards"]
CASES = [(layout, shape) for layout in LAYOUTS for shape in SHAPES]


def _parts() -> list[list[tuple]]:
    """Parts of each case, as bytes, because float8 tensors cannot be returned to another process."""
    return [
        [
            (name, part.tensor.contiguous().view(torch.uint8), part.global_shape, part.start, part.num_replicas)
            for name, part in BlockFp8(
                (NAME, tensor) for tensor in _placed(layout, matrix(shape).bfloat16())
            ).quantize()
        ]
        for layout, shape in CASES
    ]


def test_parts_of_all_ranks_are_the_quantized_matrix():
    ranks = run_ranks(_parts, 4)
    for number, (_, shape) in enumerate(CASES):
        wanted = dict(zip((NAME, SCALE), expected(matrix(shape).bfloat16()), strict=True))
        count = {name: torch.zeros(tensor.shape) for name, tensor in wanted.items()}
        for name, raw, whole, start, num_replicas in (item for parts in ranks for item in parts[number]):
            part = raw.view(wanted[name].dtype)
            at = tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))
            assert whole == tuple(wanted[name].shape)
            assert same_bits(part, wanted[name][at].contiguous())
            count[name][at] += 1 / num_replicas
        assert all(torch.all(each == 1) for each in count.values()), CASES[number]


class Float8Model(nn.Module):
    """Two tensor-parallel ranks share the rows of a matrix in block-wise float8; a norm is in bfloat16."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.weight = nn.Parameter(torch.zeros(512 // size, 256).to(FP8), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(4 // size, 2), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(256, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights) -> None:
        of_name = {NAME: self.weight, SCALE: self.scale, "norm.weight": self.norm}
        for name, tensor in weights:
            own = of_name[name].data
            own.copy_(tensor.narrow(0, self.rank * own.shape[0], own.shape[0]) if tensor.dim() == 2 else tensor)


def _update() -> None:
    values, norm = matrix((512, 256)).bfloat16(), torch.randn(256).bfloat16()
    dist.broadcast(norm, 0)
    (held,) = _placed("rows", values)
    engines = [ToyEngine(2, model=Float8Model)] if dist.get_rank() == 0 else []
    updater, weights = WeightUpdater(engines), BlockFp8([(NAME, held), ("norm.weight", norm)])
    for version in (1, 2):
        held.to_local().mul_(version)
        assert updater.update(weights.quantize(), version).verified
    updater.close()
    for engine in engines:
        wanted, scales = expected(values * 2)
        assert same_bits(torch.cat([model.weight.data for model in engine.models]), wanted)
        assert torch.equal(torch.cat([model.scale.data for model in engine.models]), scales)
        assert all(torch.equal(model.norm.data, norm) for model in engine.models)


def test_sharded_trainer_updates_a_float8_engine():
    run_ranks(_update, 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weight_is_found_before_the_engine_has_it(bad):
    values = matrix((512, 256))
    values[200, 7] = bad
    engine = ToyEngine(2, model=Float8Model)
    updater = WeightUpdater([engine])
    with pytest.raises(ValueError, match=r"infinite or NaN.*up_proj.weight"):
        updater.update(BlockFp8([(NAME, values), ("norm.weight", torch.zeros(256))]).quantize(), 1)
    updater.close()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(4), r"expected a matrix in bfloat16, float16 or float32, got shape \(4,\)"),
        (torch.zeros(4, 4, dtype=torch.int32), r"got shape \(4, 4\) and dtype torch.int32"),
        (torch.zeros(4, 4).to(FP8), r"dtype torch.float8_e4m3fn"),
        (
            LocalShard(tensor=torch.zeros(100, 4), global_shape=(200, 4), start=(100, 0)),
            r"starts or ends inside a block of 128 x 128: it has shape \(100, 4\) and starts at \(100, 0\)",
        ),
    ],
)
def test_what_cannot_be_quantized_is_named(tensor, message):
    with pytest.raises(ValueError, match=rf"'{NAME}'.*{message}"):
        BlockFp8([(NAME, tensor)])


def _partial_sums() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    tensor = DTensor.from_local(torch.ones(128, 128), init_device_mesh("cpu", (2,)), [Partial()])
    updater = WeightUpdater([])
    with pytest.raises(TypeError) as error:
        updater.declare(BlockFp8([(NAME, tensor)]).quantize())
    dist.barrier()  # the other rank may still connect its updater
    updater.close()
    return str(error.value)


def test_partial_sums_are_refused_by_name():
    assert all(NAME in message and "artial" in message for message in run_ranks(_partial_sums, 2))


def test_only_projections_are_quantized():
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight"]
    assert [name for name, _ in BlockFp8([(name, torch.zeros(4, 4)) for name in names]).quantize()] == names
    deepseek = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    quantized_names = [name for name, _ in BlockFp8([(deepseek, torch.zeros(4, 4))]).quantize()]
    assert quantized_names == [deepseek, f"{deepseek}_scale_inv"]


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_parameters_with_new_memory_are_followed(device):
    parameters = [nn.Parameter(matrix((256, 300), seed).to(device)) for seed in range(3)]
    weights = BlockFp8([(f"layers.{i}.up_proj.weight", parameter) for i, parameter in enumerate(parameters)])
    first = [tensor for _, tensor in weights.quantize()]
    for seed, parameter in enumerate(parameters):
        parameter.data = matrix((256, 300), seed + 7).to(device)
    second = [tensor for _, tensor in weights.quantize()]
    assert all(a is b for a, b in zip(first, second, strict=True))
    for seed in range(3):
        wanted, scales = expected(matrix((256, 300), seed + 7))
        assert same_bits(second[2 * seed].cpu(), wanted)
        assert torch.equal(second[2 * seed + 1].cpu(), scales)
