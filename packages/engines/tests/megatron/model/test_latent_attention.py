"""DeepSeek-V3 (latent attention and MoE) with Megatron, compared with a plain loop."""

import json
from typing import Any

import pytest
import torch
from engine_cases import build_engine, check_training, engine_training, make_batch, plain_training
from megatron_cases import YARN, check_resumed, deepseek, save_and_load
from safetensors.torch import load_file, save_file
from tidemill_engines import ModelConfig
from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.config import MegatronConfig
from tidemill_testing import run_ranks

pytestmark = pytest.mark.timeout(280)

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP, EP, ETP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
SP = {"sequence_parallel": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("yarn", {"micro_batch_size_per_gpu": 3}),
    ("yarn", {TP: 2, EP: 2, ETP: 1, **SP, "max_token_len_per_gpu": 30}),
    ("yarn", {CP: 2, EP: 2}),
    ("one group", {PP: 2, EP: 2, "max_token_len_per_gpu": 30}),
    ("one group", {PP: 2, VPP: 2}),
]


def batches():
    return [make_batch(7, seed=1, temperature=0.8), make_batch(6, seed=3)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "yarn": deepseek(folder / "yarn", q_lora_rank=24, n_group=4, topk_group=2, rope_parameters=YARN),
        "one group": deepseek(folder / "one", q_lora_rank=None, n_group=1, topk_group=1),
    }


def train(paths):
    """Results of training in each case, and the weights without training."""
    trained = [engine_training(paths[model], batches(), backend="megatron", **settings) for model, settings in CASES]
    return trained, engine_training(paths["yarn"], [], backend="megatron", **CASES[1][1])[1]


@pytest.mark.slow
def test_training_equals_a_plain_loop(paths):
    expected = {name: plain_training(path, batches()) for name, path in paths.items()}
    ranks = run_ranks(train, 4, paths, timeout_s=250)
    for number, case in enumerate(CASES):
        check_training([trained[number] for trained, _ in ranks], expected[case[0]], case)
    checkpoint = load_file(paths["yarn"] / "model.safetensors")
    for _, weights in ranks:
        assert set(weights) == set(checkpoint)
        assert all(torch.equal(weights[name], weight) for name, weight in checkpoint.items())


@pytest.mark.slow
def test_training_resumes_in_other_layouts(paths, tmp_path):
    layouts = [{TP: 2, EP: 2, ETP: 1, **SP}, {PP: 2}]
    results = run_ranks(save_and_load, 2, str(paths["yarn"]), str(tmp_path), layouts, {}, timeout_s=250)
    check_resumed(results, tmp_path / "hf")


@pytest.mark.slow
@pytest.mark.parametrize("others", [{}, {"use_distributed_optimizer": False}], ids=str)
def test_pipeline_stage_without_experts_is_saved_and_loaded(tmp_path, others):
    path = deepseek(tmp_path / "model", num_dense=2, q_lora_rank=None, n_group=1, topk_group=1)
    layouts = [{PP: 2, EP: 2}, {}, {EP: 4}, {PP: 2}]
    results = run_ranks(save_and_load, 4, str(path), str(tmp_path), layouts, others, timeout_s=250)
    check_resumed(results, tmp_path / "hf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topk_group": 4}, "expert groups that are not ranked by their best two experts"),
        ({"rope_interleave": False}, r"rotary pairs that are not interleaved \(rope_interleave=false\)"),
        ({"norm_topk_prob": False}, r"expert weights that are not normalized \(norm_topk_prob=false\)"),
        ({"attention_bias": True}, "a bias in o_proj"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0, "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_parameters": YARN | {"mscale_all_dim": 0.0}}, "YaRN scaling that differs from Megatron's"),
        ({"rope_parameters": YARN | {"attention_factor": 1.5}}, "YaRN scaling that differs from Megatron's"),
        ({"rope_parameters": YARN | {"truncate": False}}, "YaRN scaling that differs from Megatron's"),
        ({"attention_dropout": 0.1}, "attention dropout"),
    ],
)
def test_unsupported_features_are_refused(paths, fields, message):
    config = json.loads((paths["yarn"] / "config.json").read_text())
    assert Architecture.from_config(config).head_dim == 24
    with pytest.raises(ValueError, match=f"does not support a deepseek_v3 model with {message}; use the fsdp2 engine"):
        Architecture.from_config(config | fields)


def test_multi_token_prediction_layers_are_ignored(tmp_path):
    path = deepseek(tmp_path / "model", q_lora_rank=24, n_group=1, topk_group=1)
    weights = load_file(path / "model.safetensors")
    ahead = {name.replace(".3.", ".4.", 1): weight.clone() for name, weight in weights.items() if ".layers.3." in name}
    ahead |= {"model.layers.4.eh_proj.weight": torch.zeros(64, 128), "model.layers.4.enorm.weight": torch.ones(64)}
    save_file(weights | ahead, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has model.layers.4.eh_proj.weight, .* but the model of its config.json"):
        build_engine(path, backend="megatron")
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    engine = build_engine(path, backend="megatron", optimizer=False)
    engine.save_hf(tmp_path / "export")
    engine.close()
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert set(exported) == set(weights)
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
    assert json.loads((tmp_path / "export" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_balance_loss_is_refused_for_a_router_with_bias(paths):
    from tidemill_engines.megatron.moe.batch import check_moe

    architecture = Architecture.read(paths["yarn"])
    model = ModelConfig(path=str(paths["yarn"]), router_aux_loss_coef=0.1)
    with pytest.raises(
        ValueError, match=r"must be 0 for a deepseek_v3 model, got 0.1: the bias of its router balances"
    ):
        check_moe(model, MegatronConfig(), architecture, torch.device("cpu"))
