"""Choice between Transformer Engine and Megatron's own layers; no GPU is needed."""

from dataclasses import replace

import pytest
import torch
from tidemill_testing import tiny_model

pytest.importorskip("megatron.core")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    from tidemill_engines.megatron.architecture import Architecture

    return Architecture.read(tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3"))


@pytest.fixture(scope="module")
def latent(dense):
    from tidemill_engines.megatron.architecture import LatentAttention

    sizes = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    parts = LatentAttention(q_lora_rank=None, kv_lora_rank=16, **sizes, rope_theta=10000.0)
    return replace(dense, model_type="deepseek_v3", latent=parts)


def set_installed(monkeypatch, is_installed: bool) -> None:
    from tidemill_engines.megatron.model import transformer_engine

    monkeypatch.setattr(transformer_engine, "IS_INSTALLED", is_installed)


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "is_installed", "chosen"),
    [
        ("auto", CUDA, torch.bfloat16, True, "transformer_engine"),
        ("auto", CUDA, torch.bfloat16, False, "local"),
        ("auto", CUDA, torch.float32, True, "local"),
        ("auto", CPU, torch.bfloat16, True, "local"),
        ("local", CUDA, torch.bfloat16, True, "local"),
        ("transformer_engine", CUDA, torch.bfloat16, True, "transformer_engine"),
        ("transformer_engine", CUDA, torch.float32, True, "transformer_engine"),
    ],
)
def test_implementation_depends_on_device_dtype_and_installation(
    dense, monkeypatch, wanted, device, dtype, is_installed, chosen
):
    from tidemill_engines.megatron.model.transformer_engine import implementation

    set_installed(monkeypatch, is_installed)
    assert implementation(wanted, dense, device, dtype) == chosen


def test_latent_attention_does_not_use_transformer_engine(latent, monkeypatch):
    from tidemill_engines.megatron.model.transformer_engine import implementation

    set_installed(monkeypatch, True)
    assert implementation("auto", latent, CUDA, torch.bfloat16) == "local"
    with pytest.raises(ValueError, match="it does not support the MLA of deepseek_v3"):
        implementation("transformer_engine", latent, CUDA, torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "is_installed", "message"),
    [
        (CPU, True, "is 'transformer_engine', but it has no kernels for a CPU; use 'auto' or 'local'"),
        (CUDA, False, r"it is not installed, .* install it with `pip install .*transformer_engine"),
    ],
)
def test_unusable_transformer_engine_is_refused(dense, monkeypatch, device, is_installed, message):
    from tidemill_engines.megatron.model.transformer_engine import implementation

    set_installed(monkeypatch, is_installed)
    with pytest.raises(ValueError, match=message):
        implementation("transformer_engine", dense, device, torch.bfloat16)


def test_unknown_implementation_is_refused():
    from tidemill_engines.megatron.config import MegatronConfig

    with pytest.raises(ValueError, match="transformer_impl must be one of auto, local, transformer_engine; got 'te'"):
        MegatronConfig(transformer_impl="te")  # type: ignore[arg-type]
