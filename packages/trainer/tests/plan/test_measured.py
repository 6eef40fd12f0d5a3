"""The plan's estimate of a training step against peaks measured on H200s."""

import json
from pathlib import Path

import pytest
from tidemill_engines import FSDP2Config, MegatronConfig, ModelConfig
from tidemill_trainer.plan.engine import engine_memory
from tidemill_trainer.plan.model import count_model

_RESULTS = Path(__file__).parents[4] / "bench/results"
_ENGINE = "2026-11-21-engine-h200.txt"
_ROLES = "2026-11-23-roles-h200.txt"
_GIB = 2**30

_DENSE = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}


def _dense(hidden, inner, layers, heads, *, tied):
    return _DENSE | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
_MODELS = {
    "0.6b": _dense(1024, 3072, 28, 16, tied=True),
    "1.7b": _dense(2048, 6144, 28, 16, tied=True),
    "4b": _dense(2560, 9728, 36, 32, tied=True),
    "8b": _dense(4096, 12288, 36, 32, tied=False),
    "moe": _MOE,
    "moe16": _MOE | {"num_hidden_layers": 16},
}

# Model, case, GPUs, tokens of the largest micro-batch (rows of the benchmark, seed 0), measured peak in GiB, file.
_MEASURED = [
    ("0.6b", "fsdp2", 1, 26225, 59.68, _ENGINE),
    ("0.6b", "fsdp2+compile", 1, 26225, 41.48, _ENGINE),
    ("0.6b", "fsdp2+zero2", 1, 32760, 66.1, _ROLES),
    ("1.7b", "fsdp2", 1, 14238, 69.25, _ENGINE),
    ("1.7b", "fsdp2+compile", 1, 24604, 74.20, _ENGINE),
    ("4b", "fsdp2+compile", 1, 11149, 103.05, _ENGINE),
    ("4b", "fsdp2+ckpt+compile", 1, 21850, 69.18, _ENGINE),
    ("4b", "fsdp2+compile+zero2", 1, 11149, 109.82, _ENGINE),
    ("4b", "fsdp2+compile+zero2", 2, 11149, 87.34, _ENGINE),
    ("4b", "fsdp2+compile+zero2", 4, 11149, 76.10, _ENGINE),
    ("8b", "fsdp2+ckpt", 1, 7271, 130.31, _ENGINE),
    ("8b", "fsdp2+bf16+compile", 1, 7271, 99.00, _ENGINE),
    ("8b", "fsdp2+compile", 2, 7271, 99.17, _ENGINE),
    ("8b", "fsdp2+compile", 4, 7271, 68.66, _ENGINE),
    ("moe16", "fsdp2+ckpt", 2, 13348, 89.81, _ENGINE),
    ("moe", "fsdp2+compile+ckpt", 2, 13348, 126.46, _ENGINE),
    ("4b", "megatron", 1, 7537, 99.45, _ENGINE),
    ("4b", "megatron", 2, 7537, 76.97, _ENGINE),
    ("4b", "megatron+tp2+pp2", 4, 8192, 35.30, _ENGINE),
    ("4b", "megatron+tp4", 4, 29211, 47.81, _ENGINE),
    ("4b", "megatron+tp2", 4, 14671, 53.48, _ENGINE),
    ("4b", "megatron+pp2+last17", 2, 7957, 72.92, _ENGINE),
    ("8b", "megatron", 2, 7271, 129.73, _ENGINE),
    ("8b", "megatron+tp2", 2, 14238, 105.77, _ENGINE),
    ("8b", "megatron+tp4", 4, 28124, 71.09, _ENGINE),
    ("8b", "megatron+pp2+last17", 2, 7812, 113.16, _ENGINE),
    ("moe", "megatron+ep4", 4, 7537, 93.03, _ENGINE),
    ("moe", "megatron+balanced+ep4", 4, 13348, 108.78, _ENGINE),
    ("moe16", "megatron+ep2", 2, 7537, 107.21, _ENGINE),
    ("moe16", "megatron+balanced+ep2", 2, 13348, 117.91, _ENGINE),
]


def _estimate(folder, model, case, num_gpus, tokens):
    (folder / "config.json").write_text(json.dumps(_MODELS[model]))
    words = case.split("+")
    settings = ModelConfig(
        path=str(folder),
        dtype="bfloat16" if "bf16" in words else "float32",
        gradient_checkpointing="ckpt" in words,
        compile_layers="compile" in words,
    )
    sized = {w[:-1]: int(w[-1]) for w in words if w[:-1] in ("tp", "pp", "ep")}
    last = next((int(w[4:]) for w in words if w.startswith("last")), None)
    tp, pp, ep = (sized.get(kind, 1) for kind in ("tp", "pp", "ep"))
    if "megatron" in words:
        engine = MegatronConfig(
            param_dtype="bfloat16",
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1 if ep > 1 else None,
            num_layers_in_last_pipeline_stage=last,
            sequence_parallel=tp > 1,
            max_token_len_per_gpu=tokens,
        )
    else:
        engine = FSDP2Config(
            param_dtype="bfloat16", reshard_after_forward="zero2" not in words, max_token_len_per_gpu=tokens
        )
    memory = engine_memory(count_model(settings), settings, engine, num_gpus)
    return (memory.params + memory.grads + memory.optimizer + memory.gathered + memory.activations) / _GIB


def _check_source(model, case, measured, file):
    """Check that the file has the measurement."""
    rows = [row.split() for row in (_RESULTS / file).read_text().splitlines()]
    if file == _ROLES:
        assert ["policy", f"{measured}"] in [[row[0], row[-1]] for row in rows if row]
    else:
        assert any(row[:2] == [model, case] and f"{measured:.2f}" in row for row in rows)


@pytest.mark.parametrize(("model", "case", "num_gpus", "tokens", "measured", "file"), _MEASURED)
def test_estimate_is_within_15_percent_of_the_measured_peak(tmp_path, model, case, num_gpus, tokens, measured, file):
    _check_source(model, case, measured, file)
    assert _estimate(tmp_path, model, case, num_gpus, tokens) == pytest.approx(measured, rel=0.15)
