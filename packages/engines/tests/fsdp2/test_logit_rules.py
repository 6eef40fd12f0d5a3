"""Log-probabilities of models with a scale, softcap or bias of the logits, against transformers."""

import pytest
import torch
import transformers
from engine_cases import (
    SIZES,
    build_engine,
    make_batch,
    plain_log_probs,
    plain_model,
    plain_policy_like_loss,
    policy_like_loss,
)

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
FAMILIES = {
    "scaled up": (transformers.CohereConfig, transformers.CohereForCausalLM, {"logit_scale": 4.0}),
    "scaled down": (transformers.GraniteConfig, transformers.GraniteForCausalLM, {"logits_scaling": 3.0}),
    "multiplied": (transformers.HyperCLOVAXConfig, transformers.HyperCLOVAXForCausalLM, {"logits_scaling": 3.0}),
    "softcap": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {"final_logit_softcapping": 2.0, "attn_logit_softcapping": None, "head_dim": 8, "sliding_window": 5},
    ),
    "learned positions": (transformers.GPT2Config, transformers.GPT2LMHeadModel, GPT2),
    "bias": (transformers.PhiConfig, transformers.PhiForCausalLM, {}),
}


def save(path, config_cls, model_cls, fields):
    model = model_cls(config_cls(**SIZES, **fields))
    for name, parameter in model.named_parameters():
        if name == "lm_head.bias":
            torch.nn.init.normal_(parameter)
    model.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_apply_logit_scale_and_softcap(tmp_path, family):
    path = save(tmp_path / "model", *FAMILIES[family])
    batch = make_batch(7, seed=1, temperature=0.8)
    model = plain_model(path)
    expected = plain_log_probs(model, batch)
    loss, _ = plain_policy_like_loss(model, batch)
    loss.backward()
    norm = (
        torch.stack([param.grad.square().sum() for param in model.parameters() if param.grad is not None]).sum().sqrt()
    )
    engine = build_engine(path, max_token_len_per_gpu=40)
    actual = engine.infer_batch(batch, entropy=True)
    rows = zip(actual["log_probs"].unbind(), actual["entropy"].unbind(), expected, strict=True)
    for log_probs, entropy, (wanted, wanted_entropy) in rows:
        torch.testing.assert_close(log_probs, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy, wanted_entropy, rtol=1e-5, atol=1e-5)
    metrics = engine.train_batch(batch, policy_like_loss, calculate_entropy=True)
    engine.close()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_attention_softcap_is_rejected(tmp_path):
    config_cls, model_cls, fields = FAMILIES["softcap"]
    path = save(tmp_path / "model", config_cls, model_cls, fields | {"attn_logit_softcapping": 50.0})
    engine = build_engine(path)
    with pytest.raises(ValueError, match="not support softcap or attention sinks, which Gemma2Attention requires"):
        engine.infer_batch(make_batch(2))
    engine.close()
