"""Rotary embeddings of Megatron's models, compared with transformers."""

from typing import Any

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, plain_model
from tidemill_dataproto import ragged
from tidemill_testing import tiny_model

pytest.importorskip("megatron.core")

from tidemill_engines.megatron.patches.apply_rotary import apply_rotary
from tidemill_engines.megatron.rotary import FIXED_TYPES, Rotary

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
}


def rope(kind: str, theta: float = 100.0) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **ROPES[kind]}


@pytest.mark.parametrize("kind", FIXED_TYPES)
def test_rotation_equals_transformers(kind):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    torch.manual_seed(0)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 700]])
    config = LlamaConfig(head_dim=16, rope_parameters=rope(kind, 5e5))
    q, k = torch.randn(7, 4, 16), torch.randn(7, 2, 16)
    expected = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], *LlamaRotaryEmbedding(config)(q, positions)
    )
    rotary = Rotary.from_config(config, 16)
    assert (rotary.scaling > 1.1) == (kind == "yarn")
    cos, sin = rotary.cos_sin(positions, torch.float32)
    for x, other in zip((q, k), expected, strict=True):
        x.requires_grad_()
        out, truth = apply_rotary(x, cos, sin), other[0].transpose(0, 1)
        torch.testing.assert_close(out, truth)
        direction = torch.randn_like(out)
        grad = torch.autograd.grad((out * direction).sum(), x)[0]
        # rotating back and forth is the identity
        torch.testing.assert_close(apply_rotary(grad, cos, sin), direction * rotary.scaling**2)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "llama3"), ("llama", "yarn"), ("llama", "linear"), ("qwen2", "yarn"), ("qwen3_moe", "llama3")],
)
def test_log_probs_equal_transformers(tmp_path, family, kind):
    tiny_model(tmp_path, family, vocab_size=VOCAB, rope_parameters=rope(kind))
    batch = make_batch(6, longest=30)
    engine = build_engine(tmp_path, backend="megatron", optimizer=False)
    log_probs = engine.infer_batch(batch)["log_probs"]
    engine.close()
    model = plain_model(tmp_path)
    for row, response, actual in zip(
        batch["input_ids"].unbind(), batch["responses"].unbind(), log_probs.unbind(), strict=True
    ):
        with torch.no_grad():
            logits = model(input_ids=row[None]).logits[0]
        expected = torch.log_softmax(logits, -1)[len(row) - len(response) - 1 : -1].gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)
    assert int(ragged.lengths(batch["input_ids"]).max()) > 40
