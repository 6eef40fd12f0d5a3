"""Adapters in a stock SGLang engine on a GPU in bfloat16, compared with a merged model in float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tidemill_testing import tiny_model
from tidemill_weight_update import LoraConfig, WeightUpdater, merge_lora
from tidemill_weight_update.sglang import LocalEngine, sglang_launch_args

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
PLACE = {"attention_backend": "triton", "mem_fraction_static": 0.2, "max_total_tokens": 8192}
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = LoraConfig(r=16, lora_alpha=16, target_modules=MODULES)
PROMPT = torch.randint(128, (96,), generator=torch.Generator().manual_seed(0)).tolist()
MARGIN = 2.0
"""Allowed distance from float32, in units of that of the base model, which is due to bfloat16 alone. With an adapter, a
layer rounds x A and (x A) B in addition to x W, three times instead of once, and errors add as squares; merged, W + B A
is rounded in addition to x W."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", dtype=torch.bfloat16, **SHAPE)


@pytest.fixture(scope="module")
def base(checkpoint) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors", device=DEVICE)


@pytest.fixture(scope="module")
def engine(checkpoint) -> Iterator[LocalEngine]:
    import sglang

    engine = sglang.Engine(
        model_path=str(checkpoint),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        disable_radix_cache=True,  # cached prompts are computed in other chunks
        log_level="warning",
        enable_lora=True,
        max_lora_rank=CONFIG.r,
        lora_target_modules=list(MODULES),
        **PLACE,
        **sglang_launch_args(),
    )
    yield engine
    engine.shutdown()


def adapter(base: dict[str, torch.Tensor], seed: int) -> list[tuple[str, torch.Tensor]]:
    """Adapter in bfloat16; B @ A is about half as large as the weights that it is added to."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.1).to(device=DEVICE, dtype=torch.bfloat16)

    named = []
    for name, weight in base.items():
        if name.endswith("_proj.weight"):
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            named.append((f"{layer}.lora_A.weight", draw(CONFIG.r, weight.shape[1])))
            named.append((f"{layer}.lora_B.weight", draw(weight.shape[0], CONFIG.r)))
    return named


def served(engine, **fields) -> torch.Tensor:
    """Log-probabilities of all tokens of PROMPT except the first."""
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    (out,) = engine.generate(
        input_ids=[PROMPT], sampling_params=sampling, return_logprob=True, logprob_start_len=0, **fields
    )
    return torch.tensor([logprob for logprob, *_ in out["meta_info"]["input_token_logprobs"][1:]])


@torch.no_grad()
def exact(checkpoint: Path, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same, computed in float32 by transformers."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(checkpoint)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict({name: weight.float().cpu() for name, weight in weights.items()}, strict=False)
    model.tie_weights()
    tokens = torch.tensor([PROMPT])
    logprobs = model(tokens).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(-1, tokens[:, 1:, None])[0, :, 0]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().mean().item()


def test_adapters_answer_as_merged_weights_and_leave_the_base_unchanged(engine, checkpoint, base):
    updater = WeightUpdater([LocalEngine(engine)])
    own = served(engine)
    wanted = [exact(checkpoint, base)]
    rounding = distance(own, wanted[0])
    print(f"base: {rounding:.4f} from float32")
    for seed in (1, 2):
        matrices = adapter(base, seed)
        in_float32 = {name: weight.float() for name, weight in base.items()}
        wanted.append(exact(checkpoint, dict(merge_lora(in_float32.items(), matrices, CONFIG))))
        # The answers with this adapter must differ clearly from those without and with the previous one.
        apart = min(distance(wanted[-1], other) for other in wanted[:-1])
        assert apart > 10 * MARGIN * rounding

        updater.update_adapter(matrices, "policy", CONFIG, f"adapter {seed}")
        as_adapter = served(engine, lora_path="policy")
        assert torch.equal(served(engine), own)  # requests without an adapter

        assert updater.update(merge_lora(base.items(), matrices, CONFIG), f"merged {seed}").verified
        as_merged = served(engine)
        found = {"as adapter": distance(as_adapter, wanted[-1]), "merged": distance(as_merged, wanted[-1])}
        print(f"adapter {seed}: {apart:.4f} from others; {found} from float32")
        assert max(found.values()) <= MARGIN * rounding

        assert updater.update(base.items(), f"base {seed}").verified
        assert torch.equal(served(engine), own)
        assert torch.equal(served(engine, lora_path="policy"), as_adapter)
    LocalEngine(engine).unload_adapter("policy")
    assert LocalEngine(engine).adapters() == []
    assert torch.equal(served(engine), own)
    updater.close()
