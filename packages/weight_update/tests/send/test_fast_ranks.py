"""Fast path from several trainer ranks. Functions with a leading underscore run on all ranks."""

import random
import re
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from tidemill_testing import run_ranks
from tidemill_weight_update import LocalShard, WeightUpdater
from toy_engines import ATTN, EXPERTS, MLP, PADDED_VOCAB, ToyEngine, holds, tensors

MODES = ["collection", "function"]


def engines_of(*tp_sizes: int) -> list[ToyEngine]:
    """Engines on rank 0, the only rank that calls engines."""
    return [ToyEngine(size, f"toy {size}") for size in tp_sizes] if dist.get_rank() == 0 else []


def as_mode(items: Iterable, mode: str):
    items = list(items)
    return items if mode == "collection" else lambda: iter(items)


def sharded(checkpoint: dict, layout: str) -> dict:
    """Shard the tensors as a trainer with this layout does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    world = dist.get_world_size()
    if layout in ("rows", "columns", "replicated"):
        mesh = init_device_mesh("cpu", (world,))
        one = {"rows": lambda t: Shard(0), "columns": lambda t: Shard(t.dim() - 1), "replicated": lambda t: Replicate()}
        return {
            name: distribute_tensor(t, mesh, [one[layout](t) if t.dim() else Replicate()])
            for name, t in checkpoint.items()
        }
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    outer = Replicate() if layout == "hybrid" else Shard(0)
    return {
        name: distribute_tensor(t, mesh, [outer, Shard(t.dim() - 1)] if t.dim() else [Replicate(), Replicate()])
        for name, t in checkpoint.items()
    }


def _send(cases: list[tuple[str, int, torch.dtype | None]]) -> list[list[tuple]]:
    return [[result for mode in MODES for result in _send_as(mode, *case)] for case in cases]


def _send_as(mode: str, layout: str, bucket_bytes: int, dtype: torch.dtype | None) -> list[tuple]:
    engines = engines_of(2, 1, 4)
    updater = WeightUpdater(engines, bucket_bytes=bucket_bytes, dtype=dtype)
    results = []
    for version in range(3):
        checkpoint = tensors(version)
        held = list(sharded(checkpoint, layout).items())
        random.Random(dist.get_rank() + version).shuffle(held)  # another order on each rank
        stats = updater.update(as_mode(held, mode), version)
        for engine in engines:
            assert holds(engine, {n: t.to(dtype or t.dtype) for n, t in checkpoint.items()}), (mode, version)
            assert engine.version == str(version)
        results.append((stats.verified, stats.num_bytes, stats.num_tensors))
    updater.close()
    return results


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, [("rows", 100, None), ("replicated", 300, None)]),
        (3, [("rows", 1 << 20, torch.bfloat16), ("columns", 300, torch.bfloat16)]),
        (4, [("hybrid", 300, None), ("grid", 100, torch.bfloat16)]),
    ],
    ids=lambda value: " ".join(layout for layout, *_ in value) if isinstance(value, list) else None,
)
def test_each_rank_sends_its_shards(world_size, cases):
    ranks = run_ranks(_send, world_size, cases)
    for case, *updates_of_ranks in zip(cases, *ranks, strict=True):
        itemsize = (case[2] or torch.float32).itemsize
        for update in zip(*updates_of_ranks, strict=True):
            assert all(verified for verified, _, _ in update), case
            sent = [num_bytes for _, num_bytes, _ in update]
            assert sum(sent) == itemsize * sum(tensor.numel() for tensor in tensors().values()), case
            assert all(0 < num_bytes < sum(sent) for num_bytes in sent), case


def megatron(checkpoint: dict[str, torch.Tensor], tp: int, ep: int) -> list[tuple[str, LocalShard]]:
    """Local shards of one of four ranks: two pipeline stages of two ranks each.

    `tp`, `ep`: 2 if the ranks of a stage shard the layers or the experts, 1 if they are replicas. The padded vocabulary
    gives the ranks different numbers of rows. Query heads are passed one by one, as parts of a fused matrix.
    """
    stage, inner = divmod(dist.get_rank(), 2)
    items = []
    for name, tensor in checkpoint.items():
        is_first = name in ("embed.weight",) or name.startswith(ATTN)
        if is_first != (stage == 0):
            continue
        shard = {"global_shape": tuple(tensor.shape), "start": (0,) * tensor.ndim}
        expert = re.match(rf"{MLP}\.experts\.(\d+)", name)
        dim = 1 if "o_proj" in name else 0
        if expert and ep == 2:
            if int(expert[1]) // (EXPERTS // 2) != inner:
                continue
        elif name == "embed.weight" and tp == 2:
            rows = slice(inner * PADDED_VOCAB // 2, (inner + 1) * PADDED_VOCAB // 2)
            tensor, shard["start"] = tensor[rows], (rows.start, 0)
        elif name == f"{ATTN}.q_proj.weight":
            heads = [(at, tensor[at : at + 2]) for at in (0, 2, 4, 6) if tp == 1 or at // 4 == inner]
            shard |= {} if tp == 2 else {"replica": inner, "num_replicas": 2}
            items += [(name, LocalShard(tensor=head, **shard | {"start": (at, 0)})) for at, head in heads]
            continue
        elif tensor.dim() and tp == 2 and not name.startswith("norm"):
            tensor = tensor.chunk(2, dim)[inner]
            shard["start"] = tuple(inner * size if d == dim else 0 for d, size in enumerate(tensor.shape))
        else:
            shard |= {"replica": inner, "num_replicas": 2}
        items.append((name, LocalShard(tensor=tensor, **shard)))
    return items


def _send_megatron() -> list[tuple[bool, int]]:
    layouts = [(2, 1), (2, 2), (1, 2), (1, 1)]
    return [result for tp, ep in layouts for mode in MODES for result in _send_layout(tp, ep, mode)]


def _send_layout(tp: int, ep: int, mode: str) -> list[tuple[bool, int]]:
    engines = engines_of(1, 4)
    updater = WeightUpdater(engines, bucket_bytes=300, dtype=torch.bfloat16)
    results = []
    for version in range(2):
        checkpoint = tensors(version)
        stats = updater.update(as_mode(megatron(checkpoint, tp, ep), mode), version)
        for engine in engines:
            assert holds(engine, {name: tensor.bfloat16() for name, tensor in checkpoint.items()}), (tp, ep, mode)
        results.append((stats.verified, stats.num_bytes))
    updater.close()
    return results


def test_local_shards_of_pipeline_stages_and_experts_are_sent():
    ranks = run_ranks(_send_megatron, 4)
    for update in zip(*ranks, strict=True):
        assert all(verified for verified, _ in update)
        assert sum(num_bytes for _, num_bytes in update) == 2 * sum(tensor.numel() for tensor in tensors().values())


def _fsdp2() -> bool:
    from torch.distributed.fsdp import fully_shard

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.o_proj = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False)
            self.k_proj, self.v_proj = torch.nn.Linear(8, 2, bias=False), torch.nn.Linear(8, 2, bias=False)

        def forward(self, x):
            return self.o_proj(self.q_proj(x)) + (self.k_proj(x) * self.v_proj(x)).sum()

    torch.manual_seed(0)
    model = Attention()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engines = engines_of(2)
    updater = WeightUpdater(engines, bucket_bytes=200)
    rest = {name: tensor for name, tensor in tensors().items() if not name.startswith(ATTN)}
    for version, mode in enumerate(MODES * 3):
        model(torch.randn(3, 8)).sum().backward()
        optimizer.step()
        named = [(f"{ATTN}.{name}", parameter) for name, parameter in model.named_parameters()]
        assert updater.update(as_mode([*named, *rest.items()], mode), version).verified
        full = {name: parameter.full_tensor().detach() for name, parameter in named}
        for engine in engines:
            assert holds(engine, rest | full)
    updater.close()
    return True


def test_fsdp2_model_is_sent_between_training_steps():
    assert run_ranks(_fsdp2, 2) == [True, True]


def _subgroup() -> bool | None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="not a member of process_group"):
            WeightUpdater([ToyEngine(2)], process_group=group)
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    engines = [ToyEngine(2)] if dist.get_rank() == 1 else []
    updater = WeightUpdater(engines, process_group=group, bucket_bytes=300)
    items = [(n, distribute_tensor(t, mesh, [Shard(0)]) if t.dim() else t) for n, t in tensors().items()]
    updater.update(items, 1)
    updater.close()
    return all(holds(engine, tensors()) for engine in engines)


def test_subgroup_of_ranks_can_update():
    assert run_ranks(_subgroup, 3) == [None, True, True]


def outcome(updater: WeightUpdater, items) -> str:
    try:
        stats = updater.update(items, "bad")
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return f"quarantined {stats.quarantined}"


def _bad(kind: str, bad_rank: int, mode: str) -> str:
    engines = engines_of(2)
    updater = WeightUpdater(engines, bucket_bytes=300)
    good = sharded(tensors(0), "rows")
    updater.update(good.items(), "good")
    items = dict(good)
    name = f"{ATTN}.k_proj.weight"
    if dist.get_rank() == bad_rank:
        local = good[name].to_local()
        part = {"tensor": local.clone(), "global_shape": (2, 8), "start": (bad_rank, 0)}
        if kind == "nan":
            part["tensor"][0, 0] = float("nan")
            items[name] = LocalShard(**part)
        elif kind == "dtype":
            items[name] = LocalShard(**part | {"tensor": local.bfloat16()})
        elif kind == "shape":
            items[name] = LocalShard(**part | {"global_shape": (2, 9), "tensor": torch.zeros(1, 9)})
        elif kind == "overlap":
            items[name] = LocalShard(**part | {"start": (1 - bad_rank, 0)})
        elif kind == "twice":
            items = [*items.items(), (name, good[name])]
        elif kind == "part twice":
            items = [*(item for item in items.items() if item[0] != name), *[(name, LocalShard(**part))] * 2]
        elif kind == "missing part":
            del items[name]
        elif kind == "empty":
            items = {}
    named_tensors = list(items.items() if isinstance(items, dict) else items)

    def raising():
        yield from named_tensors[:7]
        raise KeyError("lost")

    function = raising if kind == "raises" and dist.get_rank() == bad_rank else lambda: iter(named_tensors)
    message = outcome(updater, named_tensors if mode == "collection" else function)
    is_checked_before = kind != "nan"  # values are checked while they are sent
    if engines and is_checked_before:
        assert holds(engines[0], tensors(0)), (kind, "changed although all was checked before")
    if engines:
        assert engines[0].version == "good", kind
        assert engines[0].paused is None or (engines[0].paused == "abort" and not is_checked_before), kind
    updater.readmit(engines, sharded(tensors(1), "rows").items(), "again")
    assert all(holds(engine, tensors(1)) and engine.version == "again" for engine in engines), kind
    updater.close()
    return message


K = f"'{ATTN}.k_proj.weight'".replace(".", r"\.")
BAD = {
    "nan": (rf"ValueError: .*infinite or NaN elements: {K}", rf"rank {{bad}} of 2: ValueError: .*NaN elements: {K}"),
    "dtype": (
        rf"disagree about {K}: rank 0 passes Sou.*, rank 1 Sou",
        rf"disagree about {K}: rank 0 passes .*, rank 1 ",
    ),
    "shape": (rf"(disagree about|load_weights failed at source) {K}", rf"(disagree about|failed at source) {K}"),
    "overlap": (rf"{K} has 16 elements, .* some twice", rf"{K} has 16 elements, .* some twice"),
    "twice": (
        rf"ValueError: tensor {K} was passed twice",
        rf"rank {{bad}} of 2: ValueError: tensor {K} was passed twice",
    ),
    "part twice": (rf"{K} has 16 elements, .* some twice", rf"{K} has 16 elements, .* some twice"),
    "missing part": (
        rf"{K} has 16 elements, .* send 8 \(rank \d: 8\)",
        rf"{K} has 16 elements, .* send 8 \(rank \d: 8\)",
    ),
    "empty": ("ValueError: .*empty iterable", "rank {bad} of 2: ValueError: .*empty iterable"),
    "raises": ("KeyError: 'lost'", "rank {bad} of 2: KeyError: 'lost'"),
}


def _all_bad() -> dict[tuple[str, int, str], str]:
    cases = [(kind, mode) for kind in BAD for mode in MODES if (kind, mode) != ("raises", "collection")]
    return {(kind, bad_rank, mode): _bad(kind, bad_rank, mode) for bad_rank in (0, 1) for kind, mode in cases}


def test_bad_tensors_on_one_rank_are_an_error_on_all():
    results = run_ranks(_all_bad, 2)
    for case in results[0]:
        kind, bad_rank, _ = case
        own, others = BAD[kind]
        messages = [result[case] for result in results]
        assert re.search(own, messages[bad_rank]), (case, messages)
        assert re.search(others.replace("{bad}", str(bad_rank)), messages[1 - bad_rank]), (case, messages)


def _wrong_engines() -> str:
    try:
        WeightUpdater([object()] if dist.get_rank() == 0 else [])
    except (TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_wrong_engine_on_rank_0_is_an_error_on_all():
    first, second = run_ranks(_wrong_engines, 2, timeout_s=60)
    assert first.startswith("TypeError: expected an engine client as engine 0 of 1, got <object")
    assert second.startswith("RuntimeError: weight update failed on rank 0 of 2: TypeError: expected an engine client")


def _plain(kind: str, mode: str, *, partial: bool) -> str:
    """Update with some tensors on rank 1 only, or on rank 0 only."""
    engines = engines_of(2)
    updater = WeightUpdater(engines, bucket_bytes=300)
    updater.update(as_mode(tensors(0).items(), mode), 0)
    holder = 1 if kind == "rank 1 alone" else 0
    named_tensors = [(n, t) for n, t in tensors(1).items() if not n.startswith(MLP) or dist.get_rank() == holder]
    if kind == "as a shard" and dist.get_rank() == 0:
        named_tensors = named_tensors[:-1]
    if kind == "as a shard" and dist.get_rank() == 1:
        name, tensor = list(tensors(1).items())[-1]
        shard = LocalShard(tensor=tensor, global_shape=tuple(tensor.shape), start=(0,) * tensor.ndim)
        named_tensors = [*named_tensors[:-1], (name, shard)]
    message = ""
    for version in (1, 2):  # the second time from the cache
        try:
            updater.update(as_mode(named_tensors, mode), version, partial=partial)
        except (ValueError, RuntimeError) as error:
            message = f"{type(error).__name__}: {error}"
    if engines:
        assert holds(engines[0], tensors(0) if holder else tensors(1))  # nothing is sent if it is refused
        assert engines[0].version == ("0" if holder else "2")
    updater.update(as_mode(tensors(2).items(), mode), "again")
    assert all(holds(engine, tensors(2)) for engine in engines)
    updater.close()
    return message


def _all_plain() -> dict[tuple[str, str, bool], str]:
    kinds = ("rank 1 alone", "rank 0 alone", "as a shard")
    return {
        (kind, mode, partial): _plain(kind, mode, partial=partial)
        for kind in kinds
        for mode in MODES
        for partial in (False, True)
    }


def test_plain_tensors_missing_on_rank_0_are_refused():
    for results in run_ranks(_all_plain, 2, timeout_s=100):
        for (kind, *_), text in results.items():
            lost = rf"ValueError: rank 1 of 2 passes 8 plain tensors that rank 0 does not.*'{MLP}.*LocalShard"
            assert re.match(lost, text) if kind == "rank 1 alone" else text == "", (kind, text)
