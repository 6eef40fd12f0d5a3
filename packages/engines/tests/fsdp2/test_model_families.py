"""Models that the engine refuses because it would compute something else than transformers, and the rows of others."""

import pytest
import torch
import transformers
from engine_cases import SIZES, VOCAB, build_engine, make_batch, plain_log_probs, plain_model
from tidemill_engines import sft_loss
from tidemill_testing import tiny_model

NOT_REGISTERED = r"'varlen' does not support {}, which has an attention that transformers does .* 'sdpa' or 'eager'"
REFUSED = {
    "no causal mask": ("BloomConfig", SIZES, {}, NOT_REGISTERED.format("bloom")),
    "attention classes by name": ("FalconConfig", SIZES, {}, NOT_REGISTERED.format("falcon")),
    "no keywords": ("StableLmConfig", SIZES, {}, NOT_REGISTERED.format("stablelm")),
    "layers before registry": ("Qwen3NextConfig", SIZES, {}, "has layers of type linear_attention"),
    "window in mask": (
        "PhimoeConfig",
        SIZES | {"num_local_experts": 4, "sliding_window": 8, "max_position_embeddings": 64},
        {},
        "'varlen' does not support phimoe, which does not pass its sliding_window of 8",
    ),
    "prediction head": (
        "ModernBertDecoderConfig",
        SIZES,
        {},
        "ModernBertDecoderForCausalLM has parameters outside of its .* lm_head.dense.weight, lm_head.norm.weight; use",
    ),
    "other output of the backbone": (
        "ProphetNetConfig",
        {"hidden_size": 32, "num_decoder_layers": 1, "num_decoder_attention_heads": 4},
        {"attn_implementation": "eager"},
        "ProphetNetForCausalLM has no backbone .* whose last_hidden_state is the input of its output embeddings",
    ),
    "no router logits": (
        "GraniteMoeConfig",
        SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"output_router_logits": True},
        "output_router_logits requires a MoE model whose router logits transformers records; granitemoe is not one",
    ),
}


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)


@pytest.mark.parametrize("case", REFUSED)
def test_model_that_would_compute_something_else_is_refused(tmp_path, case):
    config_class, fields, settings, message = REFUSED[case]
    getattr(transformers, config_class)(**fields).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        build_engine(tmp_path, model={"init_seed": 0, **settings})


def test_bidirectional_attention_is_refused(tmp_path):
    transformers.BertGenerationConfig(**SIZES).save_pretrained(tmp_path)
    engine = build_engine(tmp_path, model={"init_seed": 0}, optimizer=False)
    with pytest.raises(ValueError, match="causal attention, and BertGenerationSelfAttention is bidirectional"):
        engine.infer_batch(make_batch(2))
    engine.close()


def test_recorded_tensors_that_are_not_router_logits_are_refused(tmp_path):
    config = transformers.ExaoneMoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1
    )
    config.save_pretrained(tmp_path)
    engine = build_engine(tmp_path, model={"init_seed": 0, "router_aux_loss_coef": 0.1})
    with pytest.raises(ValueError, match=r"expected router logits of shape \[\d+, experts\] from each layer, got"):
        engine.train_batch(make_batch(2), sft_loss)
    engine.close()


OTHER_ATTENTION = {
    "sinks": (
        transformers.GptOssConfig,
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
        "eager",
    ),
    "classes by name": (transformers.FalconConfig, {"ffn_hidden_size": 64, "alibi": False}, "sdpa"),
    "learned positions": (transformers.OPTConfig, {"ffn_dim": 64, "word_embed_proj_dim": 32}, "sdpa"),
    "alibi and no scale": (transformers.MptConfig, {"d_model": 32, "n_heads": 4, "n_layers": 2}, "eager"),
}


@pytest.mark.parametrize("family", OTHER_ATTENTION)
def test_other_attentions_compute_each_row_alone(tmp_path, family):
    config_class, fields, attention = OTHER_ATTENTION[family]
    config = config_class(**SIZES | fields)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    batch = make_batch(5, seed=1)
    expected = plain_log_probs(plain_model(tmp_path), batch)
    engine = build_engine(tmp_path, model={"attn_implementation": attention}, optimizer=False)
    actual = engine.infer_batch(batch)["log_probs"].unbind()
    engine.close()
    for log_probs, (wanted, _) in zip(actual, expected, strict=True):
        torch.testing.assert_close(log_probs, wanted, rtol=1e-5, atol=1e-5)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
OTHER_ANGLES = {
    "longrope": (
        transformers.Phi3Config,
        {"original_max_position_embeddings": 10, "rope_parameters": LONGROPE},
        {"varlen": True, "sdpa": False},
    ),
    "dynamic": (
        transformers.LlamaConfig,
        {"max_position_embeddings": 10, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
        {"varlen": True, "sdpa": True},
    ),
}


@pytest.mark.parametrize("kind", OTHER_ANGLES)
def test_rotary_angles_do_not_depend_on_other_rows(tmp_path, kind):
    config_class, fields, refuses = OTHER_ANGLES[kind]
    transformers.AutoModelForCausalLM.from_config(config_class(**SIZES | fields)).save_pretrained(tmp_path)
    batch = make_batch(12, seed=4)
    lengths = batch["input_ids"].offsets().diff()
    for attention, is_refused in refuses.items():
        engine = build_engine(tmp_path, model={"attn_implementation": attention}, optimizer=False)
        rows = batch
        if is_refused:
            with pytest.raises(ValueError, match=r"row \d+ has \d+ tokens, above the 10 up to which the model's ro"):
                engine.infer_batch(batch)
            rows = batch.select_idxs((lengths <= 10).nonzero().flatten())
        actual = engine.infer_batch(rows)["log_probs"].unbind()
        engine.close()
        for log_probs, (wanted, _) in zip(actual, plain_log_probs(plain_model(tmp_path), rows), strict=True):
            torch.testing.assert_close(log_probs, wanted, rtol=1e-5, atol=1e-5)


def test_several_rows_in_a_micro_batch_require_packed_attention(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    with pytest.raises(ValueError, match=r"micro_batch_size_per_gpu > 1 requires .*='varlen'; got 'sdpa'"):
        build_engine(path, model={"attn_implementation": "sdpa"}, micro_batch_size_per_gpu=2)
