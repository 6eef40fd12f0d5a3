"""Names and blocks of a checkpoint's tensors in Megatron's parameters, without Megatron."""

import itertools

import pytest
import torch
from safetensors.torch import load_file
from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.weights.names import blocks_of
from tidemill_engines.megatron.weights.placement import Part, Placement
from tidemill_testing import tiny_model

FAMILIES = ["qwen2", "qwen3", "llama", "qwen3_moe"]


def parameters(architecture: Architecture, *, with_te: bool) -> list[str]:
    """Names of Megatron's parameters on a rank with all layers and all experts."""
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
def test_blocks_of_all_ranks_cover_the_checkpoint_once(tmp_path, family, with_te):
    """Each element is on exactly one rank, except for tensors that all ranks hold."""
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


def test_parameter_without_a_rule_is_refused(tmp_path):
    architecture = Architecture.read(tiny_model(tmp_path, "qwen3"))
    with pytest.raises(
        ValueError, match=r"expected a rule for Megatron's parameter 'decoder\.layers\.0\.mlp\.shared\.weight'"
    ):
        blocks_of("decoder.layers.0.mlp.shared.weight", architecture, Placement())
