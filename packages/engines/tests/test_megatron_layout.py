"""Where the tensors of a checkpoint lie in Megatron's parameters, without Megatron."""

import itertools
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.config import MegatronConfig, ParallelConfig
from tidemill_engines.megatron.weights.names import blocks_of
from tidemill_engines.megatron.weights.placement import Part, Placement
from tidemill_testing import tiny_model
from transformers import AutoConfig

FAMILIES = ["qwen2", "qwen3", "llama", "qwen3_moe"]
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}


def parameters(architecture: Architecture, *, with_te: bool) -> list[str]:
    """Megatron's parameters of all layers, with the experts of one rank out of one."""
    names = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    if not architecture.tie_word_embeddings:
        names.append("output_layer.weight")
    for layer in range(architecture.num_hidden_layers):
        attention, mlp = f"decoder.layers.{layer}.self_attention", f"decoder.layers.{layer}.mlp"
        norms = [f"{attention}.linear_qkv.layer_norm_weight", f"{mlp}.linear_fc1.layer_norm_weight"]
        if not with_te:
            norms[0] = f"decoder.layers.{layer}.input_layernorm.weight"
        if not with_te or architecture.num_experts:
            norms[1] = f"decoder.layers.{layer}.pre_mlp_layernorm.weight"
        names += [*norms, f"{attention}.linear_qkv.weight", f"{attention}.linear_proj.weight"]
        if architecture.qkv_bias:
            names.append(f"{attention}.linear_qkv.bias")
        if architecture.qk_norm:
            names += [f"{attention}.{part}_layernorm.weight" for part in "qk"]
        if architecture.num_experts:
            names.append(f"{mlp}.router.weight")
            each = (
                "{mlp}.experts.linear_fc{fc}.weight{e}"
                if with_te
                else "{mlp}.experts.local_experts.{e}.linear_fc{fc}.weight"
            )
            names += [each.format(mlp=mlp, e=e, fc=fc) for e in range(architecture.num_experts) for fc in (1, 2)]
        else:
            names += [f"{mlp}.linear_fc{fc}.weight" for fc in (1, 2)]
    return names


@pytest.mark.parametrize("with_te", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_all_ranks_make_up_the_checkpoint(tmp_path, family, with_te):
    """Each element of each tensor lies on exactly one of the ranks that differ, but for what they all hold."""
    tensors = load_file(
        tiny_model(tmp_path, family, vocab_size=127, tie_word_embeddings=family == "qwen2") / "model.safetensors"
    )
    architecture = Architecture.read(tmp_path)
    for tp, ep in itertools.product((1, 2), (1, 2) if architecture.num_experts else (1,)):
        counts = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
        for tp_rank, ep_rank in itertools.product(range(tp), range(ep)):
            place = Placement(
                tp=Part(rank=tp_rank, size=tp), etp=Part(rank=tp_rank, size=tp), ep=Part(rank=ep_rank, size=ep)
            )
            for parameter in parameters(architecture, with_te=with_te):
                if ".experts." in parameter and not _is_held(parameter, architecture.num_experts // ep):
                    continue
                row = 0
                for block in blocks_of(parameter, architecture, place):
                    assert block.row == row
                    assert block.global_shape == tuple(counts[block.name].shape)
                    counts[block.name][block.region] += 1
                    row += block.shape[0]
        for name, count in counts.items():
            is_whole = "norm" in name or name.endswith("gate.weight")
            expected = tp * ep if is_whole else 1 if ".experts." in name else ep
            assert count.unique().tolist() == [expected], name


def _is_held(parameter: str, count: int) -> bool:
    part = parameter.split(".experts.")[1]
    number = part.split(".")[1] if part.startswith("local") else part.split("weight")[1]
    return int(number) < count


def config(tmp_path, family: str = "qwen3", **fields: Any) -> dict[str, Any]:
    return json.loads((tiny_model(tmp_path, family) / "config.json").read_text()) | fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt_oss"}, "no rules for models of type 'gpt_oss'; .* llama, qwen2, qwen3, qwen3_moe"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": None, "rope_scaling": LONGROPE}, "rope type 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "a rotary embedding of a part of each head"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ({"attention_dropout": 0.1}, "dropout of attention"),
        ({"attention_bias": True}, "a bias of o_proj"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"hidden_size": "wide"}, "(?s)config.json is not one of a qwen3 model: .*'hidden_size' expected int, got str"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "'llama3': .*high_freq_factor"),
    ],
)
def test_an_architecture_without_rules_is_refused_by_name(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        Architecture.from_config(config(tmp_path, **fields))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_as_transformers_has_it(tmp_path, family):
    whole = config(tmp_path, family)
    rest = {name: value for name, value in whole.items() if name not in ("rope_parameters", "rms_norm_eps")}
    expected = Architecture.from_config(whole | {"rms_norm_eps": 1e-6})
    assert Architecture.from_config(rest) == expected
    assert Architecture.from_config(rest | {"rope_theta": 5e5}) != expected
    wide = Architecture.from_config({name: value for name, value in rest.items() if name != "hidden_size"})
    assert wide.hidden_size == type(AutoConfig.from_pretrained(tmp_path))().hidden_size


def test_a_parameter_without_a_rule_is_refused_by_name(tmp_path):
    architecture = Architecture.from_config(config(tmp_path))
    with pytest.raises(ValueError, match=r"no rule for Megatron's parameter 'decoder\.layers\.0\.mlp\.shared\.weight'"):
        blocks_of("decoder.layers.0.mlp.shared.weight", architecture, Placement())


@pytest.mark.parametrize(
    ("family", "sizes", "world_size", "message"),
    [
        ("qwen3", {"tensor_model_parallel_size": 2}, 3, "tp x pp x cp = 2 does not divide the 3 ranks"),
        ("qwen3", {"tensor_model_parallel_size": 4}, 4, "= 4 does not divide the 2 key and value heads"),
        ("qwen3", {"pipeline_model_parallel_size": 3}, 3, "pp x vpp = 3 does not divide the 2 layers"),
        (
            "qwen3",
            {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 2},
            2,
            "num_layers_in_last_pipeline_stage is 2, the model has 2 layers",
        ),
        (
            "qwen3",
            {"pipeline_model_parallel_size": 3, "num_layers_in_last_pipeline_stage": 1},
            3,
            "pp - 1 = 2 does not divide the 1 layers of other stages than the last",
        ),
        ("qwen3", {"expert_model_parallel_size": 2}, 2, "a qwen3 model has no experts"),
        (
            "qwen3_moe",
            {"expert_model_parallel_size": 3},
            3,
            "expert_model_parallel_size = 3 does not divide the 4",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_told(tmp_path, family, sizes, world_size, message):
    architecture = Architecture.from_config(config(tmp_path, family))
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**sizes).check(architecture, world_size)


def test_parallelism_of_nothing_is_refused():
    with pytest.raises(ValueError, match="sequence_parallel needs tensor_model_parallel_size above 1"):
        ParallelConfig(sequence_parallel=True)
    with pytest.raises(ValueError, match="needs pipeline_model_parallel_size above 1"):
        ParallelConfig(virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match="num_layers_in_last_pipeline_stage needs pipeline_model_parallel_size above"):
        ParallelConfig(num_layers_in_last_pipeline_stage=1)
    with pytest.raises(ValueError, match="context_parallel_size must be at least 1; got 0"):
        ParallelConfig(context_parallel_size=0)


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
        ({"moe_token_dispatcher_type": "flex"}, ValueError, "must be one of alltoall, allgather; got 'flex'"),
        ({"recompute_modules": "mlp"}, TypeError, r"must be a tuple of names; got 'mlp', write \('mlp',\)"),
        ({"recompute_modules": ("mlp", "norm")}, ValueError, "must be one of core_attn, .*, moe; got 'norm'"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused(settings, kind, message):
    with pytest.raises(kind, match=f"MegatronConfig.*{message}"):
        MegatronConfig(**settings)
