"""Errors of the Megatron engine: on every rank, before groups are created, and with no effect on the next engine."""

import os
import re
from typing import Any

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, shard
from tidemill_dataproto import DataProto, ragged
from tidemill_engines import EngineRegistry, LoraConfig, ModelConfig, OptimizerConfig, ParamGroup
from tidemill_engines.megatron.config import MegatronConfig
from tidemill_testing import run_ranks, tiny_model

pytestmark = pytest.mark.timeout(280)

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP, EP, ETP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
SP = {"sequence_parallel": True}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("dense", {TP: 4}, "tp x pp x cp must divide the world size 2, got 4"),
    ("dense", {CP: 3}, "tp x pp x cp must divide the world size 2, got 3"),
    ("three heads", {TP: 2}, "tensor_model_parallel_size must divide the 3 attention heads, got 2"),
    ("three layers", {PP: 2}, "pp x vpp must divide the 3 layers, got 2"),
    ("dense", {PP: 2, VPP: 2}, "pp x vpp must divide the 2 layers, got 4"),
    ("dense", {EP: 2}, "expert_model_parallel_size must be 1: qwen3 has no experts; got 2"),
    ("three experts", {EP: 2}, "expert_model_parallel_size must divide the 3 experts, got 2"),
    (
        "odd experts",
        {TP: 2, **SP, "moe_token_dispatcher_type": "allgather"},
        "must divide the moe_intermediate_size 33, got",
    ),
    ("three experts", {TP: 2}, "requires sequence_parallel=True"),
    ("dense", {"transformer_impl": "transformer_engine"}, "it has no kernels for a CPU"),
]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {"max_position_embeddings": 16}),
    "three heads": ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "three layers": ("qwen3", {"num_hidden_layers": 3}),
    "three experts": ("qwen3_moe", {"num_experts": 3}),
    "odd experts": ("qwen3_moe", {"moe_intermediate_size": 33}),
}


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        ({"lora": LoraConfig(rank=2)}, {}, "does not support ModelConfig.lora; leave"),
        ({"dtype": "bfloat16", "frozen": ("*",)}, {}, "does not support ModelConfig.dtype, ModelConfig.frozen; leave"),
        ({"compile_layers": True}, {}, "does not support ModelConfig.compile_layers; leave"),
        ({"output_router_logits": True}, {}, "does not support ModelConfig.output_router_logits; leave"),
        ({"trust_remote_code": True}, {}, "does not support ModelConfig.trust_remote_code; leave"),
        ({}, {"param_groups": (ParamGroup(pattern="*.bias"),)}, "does not support OptimizerConfig.param_groups; leave"),
    ],
)
def test_unsupported_settings_are_refused(model, optimizer, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        EngineRegistry.new(
            model_type="language_model",
            backend="megatron",
            model=ModelConfig(path="nowhere", **model),
            engine=MegatronConfig(),
            optimizer=OptimizerConfig(lr=1e-3, **optimizer),
        )


def long_rows() -> DataProto:
    """A batch with one row of 17 tokens, which only one rank has."""
    batch = make_batch(4, seed=1)
    row = ragged.ragged(ragged.values(batch["input_ids"]).new_ones(17), [17])
    columns = {"input_ids": row, "responses": ragged.split_rows(row, [10])[1]}
    return DataProto.concat([batch.select(["input_ids", "responses"]), DataProto.from_dict(columns)])


def errors_of(paths: dict[str, Any]) -> tuple[list[str], str, int, int]:
    """Return the error of each case, that of a row that is too long, the number of rows that the engine infers after
    it, and the number of threads that other engines leave behind."""
    from tidemill_engines.megatron.weights.hf_weights import unwrapped

    messages = []
    for model, settings, _ in CASES:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the texts are compared outside
            build_engine(paths[model], backend="megatron", **settings)
        messages.append(str(caught.value))
    is_last = os.environ["RANK"] == "1"
    with pytest.raises(ValueError, match=r"damaged/model.safetensors is damaged") as caught:
        build_engine(paths["damaged" if is_last else "dense"], backend="megatron")
    assert str(caught.value).startswith("rank 1: ") != is_last
    engine = build_engine(paths["dense"], backend="megatron", **{CP: 2})
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        engine.infer_batch(shard(engine, long_rows()))
    rows = engine.infer_batch(shard(engine, long_rows()[0:4]))
    with pytest.raises(ValueError, match="trains no adapter; create a second engine"):
        engine.disable_adapter()
    engine.close()
    before = len(os.listdir("/proc/self/task"))
    engine = build_engine(paths["dense"], backend="megatron", **{PP: 2})
    if is_last:
        weights = dict(unwrapped(engine.chunks[0]).named_parameters())
        weights["decoder.layers.0.mlp.linear_fc2.weight"].main_grad[0, 0] = torch.inf
    assert engine.find_nonfinite() == ["rank 1: decoder.layers.1.mlp.linear_fc2.weight"]  # the second of the model
    engine.close()
    build_engine(paths["dense"], backend="megatron", **{CP: 2}).close()
    return messages, str(caught.value), len(rows), len(os.listdir("/proc/self/task")) - before


def test_layouts_and_rows_that_do_not_fit_are_refused_on_every_rank(tmp_path):
    paths = {
        name: tiny_model(tmp_path / name, family, vocab_size=VOCAB, **fields)
        for name, (family, fields) in MODELS.items()
    }
    paths["damaged"] = tiny_model(tmp_path / "damaged", "qwen3", vocab_size=VOCAB, **MODELS["dense"][1])
    (paths["damaged"] / "model.safetensors").write_bytes(b"cut off")
    for messages, too_long, num_rows, num_threads in run_ranks(errors_of, 2, paths, timeout_s=250):
        for message, (_, _, expected) in zip(messages, CASES, strict=True):
            assert expected in message
        assert "row 4 has 17 tokens, above the model's max_position_embeddings=16" in too_long
        assert num_rows == 4
        assert num_threads <= 0
