"""Engines with quantized weights on a GPU, compared with SGLang's own load of the same files."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tidemill_testing import tiny_model
from tidemill_weight_update import WeightUpdater
from tidemill_weight_update.fp8 import BlockFp8, fp8_launch_args
from tidemill_weight_update.sglang import LocalEngine, sglang_launch_args
from torch import nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FP8, BLOCK = torch.float8_e4m3fn, 128
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 8}
SHAPES: dict[str, dict[str, Any]] = {"qwen3": SHAPE, "qwen3_moe": SHAPE | EXPERTS}
FILE = "model.safetensors"
PROMPT = torch.randint(128, (96,), generator=torch.Generator().manual_seed(0)).tolist()


def bf16_checkpoint(folder: Path, family: str, seed: int) -> Path:
    return tiny_model(folder / f"{family} {seed}", family, seed=seed, dtype=torch.bfloat16, **SHAPES[family])


def fp8_checkpoint(folder: Path, family: str, seed: int) -> Path:
    """Checkpoint in the format of DeepSeek-V3 and Qwen3-FP8: float8 matrices with a float32 scale for each block."""
    path = bf16_checkpoint(folder, family, seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path / FILE).items():
        if name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = quantized(tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrix in float8, and the scales of its blocks, float32 [rows / 128, columns / 128]."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3)) / torch.finfo(FP8).max
    return (blocks / scale[:, None, :, None]).view(rows, columns).to(FP8), scale


def float8_noise(path: Path) -> torch.Tensor:
    """How much the log-probs of the prompt change in float32 arithmetic, on the CPU, when matrices are rounded to
    float8 by block, and the inputs of layers (not those of experts) by group of 128.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def log_probs() -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT])).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]

    exact = log_probs()
    for name, weight in model.named_parameters():
        if name.endswith(("_proj", "_proj.weight")):
            matrices = weight.data.view(-1, *weight.shape[-2:])
            weight.data = torch.stack([rounded(matrix) for matrix in matrices]).view(weight.shape)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith("_proj"):
            module.register_forward_pre_hook(lambda module, args: rounded_by_group(args[0]))
    return log_probs() - exact


def rounded(weight: torch.Tensor) -> torch.Tensor:
    values, scale = quantized(weight)
    return values.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def rounded_by_group(x: torch.Tensor) -> torch.Tensor:
    groups = x.unflatten(-1, (-1, BLOCK))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(FP8).max
    return ((groups / scale).to(FP8).float() * scale).flatten(-2)


class Probed:
    """Engine with access to its parameters."""

    def __init__(self, model_path: Path, folder: Path, **fields: Any) -> None:
        import sglang

        loaders = Path(__file__).parents[4] / "testing" / "loaders"
        sys.path.insert(0, str(loaders))  # for the schedulers to import the probe
        self.engine = sglang.Engine(
            model_path=str(model_path),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            attention_backend="triton",
            sampling_backend="pytorch",
            fp8_gemm_runner_backend="triton",
            moe_runner_backend="triton",
            disable_cuda_graph=True,
            disable_radix_cache=True,
            mem_fraction_static=0.2,
            max_total_tokens=8192,
            log_level="warning",
            **sglang_launch_args(["engine_probe.dump", "engine_probe.scramble"]),
            **fields,
        )
        sys.path.pop(0)
        self._folder = folder

    def probe(self, name: str, path: str) -> None:
        named = [(path, torch.zeros(1, device="cuda"))]
        done = self.engine.update_weights_from_tensor(named, load_format=f"engine_probe.{name}", flush_cache=False)
        assert done[0], done

    def parameters(self) -> dict[str, torch.Tensor]:
        """Parameters as bytes, because float8 tensors cannot be compared."""
        path = self._folder / "parameters"
        self.probe("dump", str(path))
        return {name: tensor.contiguous().view(torch.uint8) for name, tensor in torch.load(path).items()}

    def log_probs(self) -> torch.Tensor:
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        (out,) = self.engine.generate(
            input_ids=[PROMPT], sampling_params=sampling, return_logprob=True, logprob_start_len=0
        )
        return torch.tensor([logprob for logprob, *_ in out["meta_info"]["input_token_logprobs"][1:]])


@pytest.fixture
def probed(tmp_path) -> Iterator[Any]:
    started: list[Probed] = []

    def start(model_path: Path, **fields: Any) -> Probed:
        started.append(Probed(model_path, tmp_path, **fields))
        return started[-1]

    yield start
    for each in started:
        each.engine.shutdown()


@pytest.mark.parametrize("family", SHAPES)
def test_float8_weights_and_scales_arrive_bitwise(probed, tmp_path, family):
    first, second = (fp8_checkpoint(tmp_path, family, seed) for seed in (0, 1))
    stock = probed(first)
    wanted = {first: (stock.parameters(), stock.log_probs())}
    done = stock.engine.update_weights_from_disk(str(second))
    assert done[0], done
    wanted[second] = (stock.parameters(), stock.log_probs())
    assert not torch.allclose(wanted[first][1], wanted[second][1], atol=0.1)

    updater = WeightUpdater([LocalEngine(stock.engine)])
    for version, path in enumerate((first, second, first)):
        stock.probe("scramble", "")
        stats = updater.update(load_file(path / FILE, device="cuda").items(), version)
        assert stats.verified
        assert not stats.through_loader
        parameters, log_probs = wanted[path]
        found = stock.parameters()
        assert found.keys() == parameters.keys()
        assert [name for name in parameters if not torch.equal(found[name], parameters[name])] == []
        assert torch.equal(stock.log_probs(), log_probs)
    updater.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", SHAPES)
def test_trainer_in_higher_precision_updates_a_float8_engine(probed, tmp_path, family, dtype):
    wide = [bf16_checkpoint(tmp_path / "bf16", family, seed) for seed in (0, 1)]
    plain = probed(wide[0])
    engine = probed(wide[0], **fp8_launch_args())
    wanted = []
    for seed in (0, 1):
        done = engine.engine.update_weights_from_disk(
            str(fp8_checkpoint(tmp_path / "fp8", family, seed)), load_format="auto"
        )
        assert done[0], done
        wanted.append((engine.parameters(), engine.log_probs()))

    held, other = ({name: t.to(dtype) for name, t in load_file(path / FILE, device="cuda").items()} for path in wide)
    updater, weights = WeightUpdater([LocalEngine(engine.engine)]), BlockFp8(held.items())
    for version, (parameters, log_probs) in enumerate((wanted[0], wanted[1], wanted[0])):
        engine.probe("scramble", "")
        stats = updater.update(weights.quantize(), version)
        assert stats.verified
        assert not stats.through_loader
        found = engine.parameters()
        assert found.keys() == parameters.keys()
        assert [name for name in parameters if not torch.equal(found[name], parameters[name])] == []
        assert torch.equal(engine.log_probs(), log_probs)
        for name, tensor in held.items():
            tensor.copy_(other[name]) if version == 0 else tensor.copy_(load_file(wide[0] / FILE)[name])
    difference = (wanted[0][1] - plain.log_probs()).abs()
    print(f"{family}: log-probs in float8 and bfloat16 differ by {difference.mean():.4f}, max {difference.max():.4f}")
    noise = float8_noise(wide[0]).abs()
    print(f"{family}: in float32 arithmetic they differ by {noise.mean():.4f}, max {noise.max():.4f}")
    assert 0.75 < difference.mean() / noise.mean() < 1.33
    updater.close()


def test_engine_with_online_quantization_refuses_and_keeps_its_weights(probed, tmp_path):
    first, second = (bf16_checkpoint(tmp_path, "qwen3", seed) for seed in (0, 1))
    online = probed(first, quantization="fp8")
    log_probs = online.log_probs()
    updater = WeightUpdater([LocalEngine(online.engine)])
    with pytest.raises(RuntimeError) as raised:
        updater.update(load_file(second / FILE, device="cuda").items(), 1)
    assert "fp8_launch_args()" in str(raised.value)
    assert torch.equal(online.log_probs(), log_probs)
    updater.close()
