import json

import pytest
from tidemill_engines import EngineRegistry, FSDP2Config, MegatronConfig, ModelConfig
from tidemill_engines.fsdp2.value_model import FSDP2ValueModel
from tidemill_testing.tiny import tiny_model
from tidemill_trainer.bench.shapes import SHAPES
from tidemill_trainer.cli import BENCH_CONFIG, main
from tidemill_trainer.config_file import ConfigError, load_config
from tidemill_trainer.gpus import placed
from tidemill_trainer.plan.check import check_memory
from tidemill_trainer.plan.engine import engine_memory, megatron_params
from tidemill_trainer.plan.model import count_model
from tidemill_trainer.plan.phases import PHASES, kv_cache_token_bytes
from tidemill_trainer.plan.traffic import Steps, bytes_per_step
from transformers import AutoModelForCausalLM


@pytest.fixture(params=["qwen3", "qwen3_moe"])
def model(tmp_path, request):
    return tiny_model(tmp_path / "model", request.param, tie_word_embeddings=False)


@pytest.fixture
def plan(tmp_path, capsys):
    """Run the command on a tiny model without weights; return the status, and what was printed."""
    for file in tiny_model(tmp_path / "tiny").glob("*.safetensors"):
        file.unlink()
    config = tmp_path / "run.toml"
    config.write_text(f"[model]\npath = '{tmp_path / 'tiny'}'\n[rollout]\nresponse_length = 128\n")

    def run(*args):
        status = main(["plan", str(config), "data.max_prompt_length=128", *args])
        return status, capsys.readouterr()

    return run


def test_parameters_are_those_of_the_model(model):
    params = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    sizes = count_model(ModelConfig(path=str(model)))
    assert sizes.total == sizes.trainable == sum(p.numel() for p in params.values())
    assert sizes.experts == sum(p.numel() for name, p in params.items() if ".experts." in name)
    assert sizes.root == sum(p.numel() for name, p in params.items() if ".layers." not in name)
    frozen = count_model(ModelConfig(path=str(model), frozen=("model.embed_tokens.*",)))
    assert frozen.trainable == sizes.total - params["model.embed_tokens.weight"].numel()


def test_parameters_are_counted_without_compiling_the_layers(tmp_path, monkeypatch):
    path = tiny_model(tmp_path / "model", "qwen3")
    monkeypatch.setattr("tidemill_engines.fsdp2.model.compile_layers", lambda _: pytest.fail("imports a compiler"))
    assert count_model(ModelConfig(path=str(path), compile_layers=True)).num_layers == 2


def test_model_of_a_benchmark_is_planned_by_its_name(plan):
    status, printed = plan("model.path=qwen3-0.6b", "--device-memory=139GiB", "--num-gpus=1")
    assert status == 0, printed
    assert "policy: 596,049,920 parameters" in printed.out


def test_parameters_of_a_value_model_are_those_that_the_engine_builds(model):
    settings = ModelConfig(path=str(model))
    engine = EngineRegistry.new(
        model_type="value_model", backend="fsdp2", model=settings, engine=FSDP2Config(), optimizer=None
    )
    assert isinstance(engine, FSDP2ValueModel)
    built = sum(p.numel() for p in engine.build_model().parameters())
    assert count_model(settings, is_value=True).total == built


def test_megatron_ranks_hold_all_parameters(model):
    sizes = count_model(ModelConfig(path=str(model)))
    assert sum(megatron_params(sizes, MegatronConfig())) == sizes.total
    others, experts = megatron_params(sizes, MegatronConfig(tensor_model_parallel_size=2, sequence_parallel=True))
    copies = sizes.replicated + sizes.hidden
    assert 2 * (others + experts) - copies == sizes.total


@pytest.mark.parametrize("size", [2, 4])
def test_fsdp2_states_are_divided_among_the_ranks(model, size):
    settings = ModelConfig(path=str(model))
    sizes = count_model(settings)
    memory = engine_memory(sizes, settings, FSDP2Config(), size)
    assert (memory.params, memory.grads) == (4 * sizes.total / size, 4 * sizes.total / size)
    assert memory.optimizer == 8 * sizes.total / size


def test_step_is_described_in_words():
    assert Steps(prompts=64, n=8, optimizer_steps=4, episodes=128).sentence() == (
        "64 prompts x 8 = 512 episodes, 4 optimizer steps of 128"
    )
    assert "7 optimizer steps of at most 80" in Steps(prompts=64, n=8, optimizer_steps=7, episodes=80).sentence()


def test_text_fits_into_100_columns_and_compares_nothing_without_a_device(plan, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, printed = plan("actor.ppo_mini_batch_size=16", "algorithm.adv_estimator=gae")
    lines = printed.out.splitlines()
    assert status == 0
    assert lines[0] == "64 prompts x 8 = 512 episodes, 4 optimizer steps of 128"
    assert max(map(len, lines)) <= 100
    assert "no device memory was compared" in lines[-1]
    assert all(any(line.startswith(phase) for line in lines) for phase in PHASES)
    assert any(line.startswith("critic: ") for line in lines)


def test_what_does_not_fit_is_named_with_its_phase_and_key(plan):
    status, printed = plan("--device-memory", "20MiB", "weight_update.bucket_bytes=1024")
    assert status == 1
    message = " ".join(printed.err.split())
    assert "forward/backward requires" in message
    assert "policy activations" in message
    assert "lower engine.max_token_len_per_gpu" in message
    status, printed = plan("--device-memory", "900MiB", "rollout.max_total_tokens=4096")
    assert status == 1
    message = " ".join(printed.err.split())
    assert "weight update requires" in message
    assert "lower weight_update.bucket_bytes" in message
    assert plan("--device-memory", "20GiB", "rollout.max_total_tokens=4096")[0] == 0


def test_json_has_the_bytes_of_each_part(plan):
    status, printed = plan("--device-memory", "20GiB", "--json")
    found = json.loads(printed.out)
    assert (status, found["problems"]) == (0, [])
    for device in found["devices"]:
        for phase in device["phases"].values():
            assert phase["total"] == pytest.approx(sum(part["bytes"] for part in phase["parts"]), abs=9)
    parts = next(device for device in found["devices"] if device["name"] == "engine")["phases"]["generation"]["parts"]
    assert sum(part["bytes"] for part in parts) == pytest.approx(0.8 * 20 * 2**30, abs=2)  # mem_fraction_static


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device-memory", "20"], "--device-memory must be a number with GiB, MiB, GB or MB"),
        (["actor.num_workers=3", "engine.fsdp_size=2"], "engine.fsdp_size = 2 must divide actor.num_workers=3"),
        (["rollout.tensor_parallel_size=3"], "must divide the 4 attention heads"),
    ],
)
def test_invalid_arguments_and_sizes_are_rejected(plan, args, message):
    status, printed = plan(*args)
    assert status == 1
    assert message in " ".join(printed.err.split())


def test_offloaded_states_are_not_in_memory_during_generation(plan):
    offloaded = ("engine.param_offload=true", "engine.optimizer_offload=true", "--json")
    device = json.loads(plan(*offloaded)[1].out)["devices"][0]["phases"]
    assert device["generation"]["total"] == 0
    assert {part["kind"] for part in device["optimizer"]["parts"]} == {"weights", "gradients", "optimizer"}


def _parts(device, phase):
    return {(part["role"], part["kind"]) for part in device["phases"][phase]["parts"]}


def test_in_turns_only_one_side_is_in_memory(plan):
    [device] = json.loads(plan("--num-gpus", "1", "--json")[1].out)["devices"]  # by default
    assert device["name"] == "policy + engine in turns"
    assert _parts(device, "generation") == {("engine", "weights"), ("engine", "KV pool")}
    assert _parts(device, "log-probs") == {("policy", kind) for kind in ("weights", "gathered", "activations")}
    states = {("policy", kind) for kind in ("weights", "gradients")}
    assert _parts(device, "forward/backward") == states | {("policy", "gathered"), ("policy", "activations")}
    assert _parts(device, "optimizer") == states | {("policy", "optimizer")}
    assert _parts(device, "weight update") == {("policy", "buckets"), ("policy", "weights"), ("engine", "weights")}
    sizes = {
        phase: {(part["role"], part["kind"]): part["bytes"] for part in device["phases"][phase]["parts"]}
        for phase in ("weight update", "optimizer")
    }
    assert sizes["weight update"]["policy", "weights"] == sizes["optimizer"]["policy", "weights"]


def test_what_has_no_room_until_the_weights_are_sent_is_offloaded_after_each_step(plan):
    def planned(*memory):
        offloads = ("placement.offload=true", "engine.reshard_after_forward=true", *SMALL)
        [device] = json.loads(plan("--num-gpus", "1", "--json", *offloads, *memory)[1].out)["devices"]
        return device

    def on_a_device_with(share_of, share):
        return planned("--device-memory", f"{share_of / share / 2**20:.6f}MiB")

    phases = ("forward/backward", "optimizer", "weight update")
    free = planned("--device-memory", "16GiB")
    assert all({("policy", "weights"), ("policy", "optimizer")} <= _parts(free, phase) for phase in phases)
    assert {("policy", "weights"), ("policy", "optimizer")}.isdisjoint(_parts(free, "generation"))
    most = max(free["phases"][phase]["total"] for phase in phases)
    assert on_a_device_with(most, 0.78)["phases"]["weight update"] == free["phases"]["weight update"]
    without_state = on_a_device_with(most, 0.82)
    assert without_state["phases"]["forward/backward"] == planned()["phases"]["forward/backward"]
    total = planned()["phases"]["weight update"]["total"]
    assert without_state["phases"]["weight update"]["total"] == total
    assert 0 < on_a_device_with(total, 0.82)["phases"]["weight update"]["total"] < total


def test_what_stays_until_the_weights_are_sent_is_beside_a_critic_at_work(plan):
    critic = ("algorithm.adv_estimator=gae", "placement.offload=true", *SMALL, "--num-gpus=1", "--device-memory=16GiB")
    [device] = json.loads(plan(*critic, "--json")[1].out)["devices"]
    kept = {("policy", "weights"), ("policy", "optimizer")}
    assert kept | {("critic", "gradients"), ("critic", "activations")} <= _parts(device, "forward/backward")
    assert kept | {("critic", "gradients"), ("critic", "optimizer")} <= _parts(device, "optimizer")
    assert ("policy", "gradients") not in _parts(device, "optimizer")


def test_engines_of_a_larger_cluster_have_their_own_devices(plan):
    for number in ([], ["--num-gpus", "2"]):
        names = [device["name"] for device in json.loads(plan(*number, "--json")[1].out)["devices"]]
        assert names == ["policy", "engine"]


SMALL = (
    *("weight_update.bucket_bytes=1024", "rollout.max_total_tokens=2000000", "engine.max_token_len_per_gpu=256"),
    *("engine.param_dtype=float32", "model.compile_layers=false"),
)
FRACTIONS = ("actor.num_gpus_per_worker=0.5", "rollout.num_gpus_per_engine=0.5")


def test_side_by_side_does_not_fit_where_turns_do(plan):
    """The KV pool alone takes almost the whole device."""
    engine = json.loads(plan(*SMALL, "--json")[1].out)["devices"][1]["phases"]["generation"]["total"]
    memory = ["--device-memory", f"{1.01 * engine / 2**20:.6f}MiB"]
    assert plan(*SMALL, *memory, "placement.engines=turns")[0] == 0
    status, printed = plan(*SMALL, *memory, *FRACTIONS)
    assert status == 1
    assert 'set placement.engines="turns" without fractions of GPUs' in " ".join(printed.err.split())


def test_run_whose_placement_cannot_fit_is_refused_with_phase_and_key(tmp_path, plan, progress, terminal):
    plan()  # creates the model
    config = placed(load_config(tmp_path / "run.toml", [*SMALL, "data.max_prompt_length=128", *FRACTIONS]), 1)
    total = json.loads(plan(*SMALL, *FRACTIONS, "--json")[1].out)["devices"][0]["phases"]["forward/backward"]["total"]
    check_memory(config, 1.01 * total, progress)
    assert terminal.getvalue() == ""
    check_memory(config, 0.95 * total, progress)
    assert "this may not fit: forward/backward requires" in terminal.getvalue()
    with pytest.raises(ConfigError, match=r"forward/backward requires .* most of it is engine KV pool .*turns"):
        check_memory(config, 0.8 * total, progress)


def _count(folder, **fields):
    (folder / "config.json").write_text(json.dumps(fields))
    return count_model(ModelConfig(path=str(folder)))


def test_experts_of_models_without_a_size_of_their_own(tmp_path):
    sizes = _count(
        tmp_path,
        model_type="mixtral",
        architectures=["MixtralForCausalLM"],
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=128,
    )
    assert (sizes.num_experts, sizes.num_copies, sizes.inner) == (8, 2, 2 * 96)
    assert sizes.experts == 2 * 8 * 3 * 64 * 96
    assert sizes.largest == 8 * 2 * 64 * 96  # gate and up of all experts of a layer


def test_kv_cache_of_latent_attention_is_that_of_one_head(tmp_path):
    sizes = _count(
        tmp_path,
        model_type="deepseek_v3",
        architectures=["DeepseekV3ForCausalLM"],
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=2,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=24,
        qk_rope_head_dim=8,
        v_head_dim=24,
        vocab_size=128,
    )
    assert (sizes.query, sizes.inner, sizes.num_experts) == (4 * 32, 2 * 32 + 2 * 32, 4)
    for tp in (1, 4):
        config = load_config(BENCH_CONFIG, [f"rollout.tensor_parallel_size={tp}", "rollout.dtype=bfloat16"])
        assert kv_cache_token_bytes(config, sizes) == (16 + 8) * 3 * 2


@pytest.mark.parametrize(("tp", "copies"), [(1, 1), (4, 1), (8, 1), (16, 2)])
def test_ranks_beyond_the_key_heads_have_copies_of_the_kv_cache(tmp_path, tp, copies):
    sizes = _count(tmp_path, **SHAPES["qwen3-0.6b"])
    config = load_config(BENCH_CONFIG, [f"rollout.tensor_parallel_size={tp}", "rollout.dtype=bfloat16"])
    assert kv_cache_token_bytes(config, sizes) == 2 * 8 * 128 * 28 * 2 * copies / tp


def test_long_rows_have_micro_batches_of_their_own(tmp_path):
    sizes = _count(tmp_path, **SHAPES["qwen3-0.6b"])
    lengths = ["data.max_prompt_length=1000", "rollout.response_length=8000", "actor.num_workers=2"]
    batch = ["data.train_batch_size=8", "rollout.n=8", "engine.max_token_len_per_gpu=16384"]
    config = load_config(BENCH_CONFIG, [*lengths, *batch, "engine.reshard_after_forward=true"])
    moved = bytes_per_step(config, sizes)["all-gather per rank and optimizer step"]
    assert moved == sizes.total / 2 * 4 * 2 * 32  # float32 on a CPU; 32 rows of a rank, one per micro-batch
