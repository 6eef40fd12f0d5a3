"""Checks of the Megatron engine's configuration."""

from dataclasses import replace

import pytest
from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.config import MegatronConfig
from tidemill_testing import tiny_model


@pytest.mark.parametrize(
    ("family", "sizes", "world_size", "message"),
    [
        (
            "qwen3",
            {"tensor_model_parallel_size": 2},
            3,
            r"tp x pp x cp must divide the world size 3, got 2; .*actor\.num_workers",
        ),
        ("qwen3", {"tensor_model_parallel_size": 4}, 4, "must divide the 2 key and value heads, got 4; choose"),
        ("qwen3", {"pipeline_model_parallel_size": 3}, 3, "pp x vpp must divide the 2 layers, got 3"),
        (
            "qwen3",
            {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 2},
            2,
            "num_layers_in_last_pipeline_stage must be below the 2 layers of the model; got 2",
        ),
        (
            "qwen3",
            {"pipeline_model_parallel_size": 3, "num_layers_in_last_pipeline_stage": 1},
            3,
            "pp - 1 must divide the 1 layers of the stages before the last, got 2",
        ),
        ("qwen3", {"expert_model_parallel_size": 2}, 2, "must be 1: qwen3 has no experts; got 2"),
        (
            "qwen3_moe",
            {"expert_model_parallel_size": 3},
            3,
            "expert_model_parallel_size must divide the 4 experts, got 3",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tmp_path, family, sizes, world_size, message):
    architecture = Architecture.read(tiny_model(tmp_path, family))
    with pytest.raises(ValueError, match=message):
        MegatronConfig(**sizes).check_architecture(architecture, world_size)


def test_settings_that_require_parallelism_and_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="sequence_parallel requires tensor_model_parallel_size > 1"):
        MegatronConfig(sequence_parallel=True)
    with pytest.raises(ValueError, match="requires pipeline_model_parallel_size > 1"):
        MegatronConfig(virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match="num_layers_in_last_pipeline_stage requires pipeline_model_parallel_size"):
        MegatronConfig(num_layers_in_last_pipeline_stage=1)
    with pytest.raises(ValueError, match="context_parallel_size must be at least 1; got 0"):
        MegatronConfig(context_parallel_size=0)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"max_token_len_per_gpu": "16384"}, TypeError, "max_token_len_per_gpu must be a whole number; got '16384'"),
        ({"max_token_len_per_gpu": 1.5}, TypeError, "max_token_len_per_gpu must be a whole number; got 1.5"),
        ({"micro_batch_size_per_gpu": 0}, ValueError, "micro_batch_size_per_gpu must be at least 1; got 0"),
        ({"tensor_model_parallel_size": True}, TypeError, "parallel_size must be a whole number; got True"),
        ({"expert_tensor_parallel_size": 2.0}, TypeError, "parallel_size must be a whole number; got 2.0"),
        ({"timeout_s": "60"}, TypeError, "timeout_s must be a number; got '60'"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be above 0; got 0"),
        ({"peak_tflops": 0.0}, ValueError, "peak_tflops must be above 0; got 0.0"),
        ({"seed": 1.0}, TypeError, "seed must be a whole number; got 1.0"),
        ({"device": "tpu"}, ValueError, "device must be one of auto, cpu, cuda; got 'tpu'"),
        ({"param_dtype": "float64"}, ValueError, "param_dtype must be one of float32, bfloat16; got 'float64'"),
        ({"moe_token_dispatcher_type": "flex"}, ValueError, "must be one of auto, alltoall, allgather; got 'flex'"),
        ({"recompute_modules": "mlp"}, TypeError, r"must be a tuple of names; got 'mlp', write \('mlp',\)"),
        ({"recompute_modules": ("mlp", "norm")}, ValueError, "must be one of core_attn, .*, moe; got 'norm'"),
    ],
)
def test_invalid_settings_are_refused(settings, kind, message):
    with pytest.raises(kind, match=f"MegatronConfig.*{message}"):
        MegatronConfig(**settings)


@pytest.mark.parametrize(
    ("sizes", "dispatcher"),
    [
        ({"expert_model_parallel_size": 4}, "allgather"),
        ({"expert_model_parallel_size": 8}, "alltoall"),
        ({"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 2}, "alltoall"),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, "allgather"),
        ({"expert_model_parallel_size": 4, "pipeline_model_parallel_size": 2}, "alltoall"),
        ({"expert_model_parallel_size": 4, "moe_token_dispatcher_type": "alltoall"}, "alltoall"),
        ({}, "alltoall"),
    ],
)
def test_tokens_are_gathered_where_fewer_ranks_share_the_experts_than_a_token_has(tmp_path, sizes, dispatcher):
    architecture = replace(Architecture.read(tiny_model(tmp_path, "qwen3_moe")), num_experts_per_tok=8)
    assert MegatronConfig(**sizes).token_dispatcher(architecture) == dispatcher
