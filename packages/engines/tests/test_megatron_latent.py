"""DeepSeek-V3's latent attention and mixtures with Megatron, against a plain loop."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import VOCAB, build_engine, check_training, engine_training, make_batch, plain_training
from megatron_cases import check_goes_on, save_and_load
from safetensors.torch import load_file, save_file
from tidemill_engines import ModelConfig
from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.config import MegatronConfig
from tidemill_testing import run_ranks

pytestmark = pytest.mark.timeout(280)

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP, EP, ETP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
SP = {"sequence_parallel": True}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 16,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("yarn", {"micro_batch_size_per_gpu": 3}),
    ("yarn", {TP: 2, EP: 2, ETP: 1, **SP, "max_token_len_per_gpu": 30}),
    ("yarn", {CP: 2, EP: 2}),
    ("one group", {PP: 2, EP: 2, "max_token_len_per_gpu": 30}),
    ("one group", {PP: 2, VPP: 2}),
]


def deepseek(path: Path, *, num_dense: int = 1, **fields: Any) -> Path:
    """A tiny model whose routers have a bias and whose first layers have no experts."""
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=4,
        first_k_dense_replace=num_dense,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        max_position_embeddings=64,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        **fields,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.DeepseekV3ForCausalLM(config)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(path)
    return path


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
    """What training gives in each case; then the weights without any."""
    trained = [engine_training(paths[model], batches(), backend="megatron", **settings) for model, settings in CASES]
    return trained, engine_training(paths["yarn"], [], backend="megatron", **CASES[1][1])[1]


@pytest.mark.slow
def test_latent_attention_equals_a_plain_loop(paths):
    expected = {name: plain_training(path, batches()) for name, path in paths.items()}
    ranks = run_ranks(train, 4, paths, timeout_s=250)
    for number, case in enumerate(CASES):
        check_training([trained[number] for trained, _ in ranks], expected[case[0]], case)
    checkpoint = load_file(paths["yarn"] / "model.safetensors")
    for _, weights in ranks:
        assert set(weights) == set(checkpoint)
        assert all(torch.equal(weights[name], weight) for name, weight in checkpoint.items())


@pytest.mark.slow
def test_training_goes_on_where_it_was_saved(paths, tmp_path):
    layouts = [{TP: 2, EP: 2, ETP: 1, **SP}, {PP: 2}]
    results = run_ranks(save_and_load, 2, str(paths["yarn"]), str(tmp_path), layouts, {}, timeout_s=250)
    check_goes_on(results, tmp_path / "hf")


@pytest.mark.slow
@pytest.mark.parametrize("others", [{}, {"use_distributed_optimizer": False}], ids=str)
def test_a_stage_without_experts_is_saved_and_loaded(tmp_path, others):
    path = deepseek(tmp_path / "model", num_dense=2, q_lora_rank=None, n_group=1, topk_group=1)
    layouts = [{PP: 2, EP: 2}, {}, {EP: 4}, {PP: 2}]
    results = run_ranks(save_and_load, 4, str(path), str(tmp_path), layouts, others, timeout_s=250)
    check_goes_on(results, tmp_path / "hf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topk_group": 4}, "groups of experts of which other than two decide"),
        ({"rope_interleave": False}, "rotary pairs that lie apart"),
        ({"norm_topk_prob": False}, "weights of experts that do not add up to one"),
        ({"attention_bias": True}, "a bias of o_proj"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0, "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_parameters": YARN | {"mscale_all_dim": 0.0}}, "yarn scaled by other rules than Megatron's"),
        ({"rope_parameters": YARN | {"attention_factor": 1.5}}, "yarn scaled by other rules than Megatron's"),
        ({"rope_parameters": YARN | {"truncate": False}}, "yarn scaled by other rules than Megatron's"),
        ({"attention_dropout": 0.1}, "dropout of attention"),
    ],
)
def test_what_megatron_computes_otherwise_is_refused(paths, fields, message):
    config = json.loads((paths["yarn"] / "config.json").read_text())
    assert Architecture.from_config(config).head_dim == 24
    with pytest.raises(ValueError, match=f"cannot train a deepseek_v3 model with {message}"):
        Architecture.from_config(config | fields)


def test_layers_for_further_predictions_are_left_out(tmp_path):
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


def test_there_is_no_balance_loss_beside_the_bias(paths):
    from tidemill_engines.megatron.moe.batch import check_moe

    architecture = Architecture.read(paths["yarn"])
    model = ModelConfig(path=str(paths["yarn"]), router_aux_loss_coef=0.1)
    with pytest.raises(ValueError, match="a deepseek_v3 is balanced by the bias of its router"):
        check_moe(model, MegatronConfig(), architecture, torch.device("cpu"))
