import pickle

import pytest
from tidemill_engines.megatron.config import MegatronConfig
from tidemill_trainer.config_file import ConfigError, load_config, save_config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temprature=1", r"unknown config key rollout\.temprature; did you mean rollout\.temperature\?"),
        ("optimzer.lr=1", r"unknown config key optimzer; did you mean optimizer\?"),
        ("zzz=1", r"unknown config key zzz; known keys: model, data"),
        ("optimizer.lr=fast", r"optimizer\.lr must be a valid number, got 'fast'"),
        ("rollout.n=true", r"rollout\.n must be a valid integer, got True"),
        ("rollout.n='8'", r"rollout\.n must be a valid integer, got '8'"),
        ("rollout.n=0", r"rollout\.n must be >= 1, got 0"),
        ("actor.ppo_mini_batch_size=-4", r"actor\.ppo_mini_batch_size must be >= 1, got -4"),
        ("actor.ppo_mini_batch_size=65", r"^actor\.ppo_mini_batch_size must be <= data\.train_batch_size=64, got 65"),
        ("trainer.max_ckpt_to_keep=0", r"trainer\.max_ckpt_to_keep must be >= 1, got 0"),
        ("reward.timeout_s=0", r"reward\.timeout_s must be > 0, got 0"),
        ("reward.function=endpoint", r"^reward\.function=\"endpoint\" requires reward\.url, the address of an SGLang"),
        ("reward.url=http://h", r"^reward\.url=\"http://h\" requires reward\.function=\"endpoint\", got None; set it"),
        ("trainer.seed=-1", r"trainer\.seed must be >= 0, got -1"),
        (
            "trainer.seed=18446744073709551616",
            r"trainer\.seed must be < 18446744073709551616, got 18446744073709551616",
        ),
        (
            "engine.max_token_len_per_gpu=100",
            "must be <= 100, the tokens of a micro-batch, got 1024; raise engine.max_token_len_per_gpu",
        ),
        ("trainer.stop_at_accuracy=0.5", r"trainer\.stop_at_accuracy requires data\.val_files"),
        ("rollout.top_k=0", r"rollout\.top_k must be >= 1, or -1 for all tokens, got 0"),
        ("rollout.max_total_tokens=-3", r"rollout\.max_total_tokens must be >= 1, got -3"),
        ("rollout.num_gpus_per_engine=-1", r"rollout\.num_gpus_per_engine must be > 0, got -1"),
        ("rollout.mem_fraction_static=3", r"rollout\.mem_fraction_static must be < 1, got 3"),
        ("rollout.timeout_s=0", r"rollout\.timeout_s must be > 0, got 0"),
        ("algorithm.kl_loss_type=k3", r"algorithm: kl_loss_type has no effect without kl_loss_coef; set it, or remove"),
        ("algorithm.kl_penalty=k4", r"algorithm\.kl_penalty must be 'kl', 'k1', "),
        ("algorithm.entropy_coeff=nan", r"algorithm\.entropy_coeff must be a finite number, got nan"),
        ("actor.num_gpus_per_worker=0", r"actor\.num_gpus_per_worker must be > 0, got 0"),
        ("actor.omp_num_threads=0", r"actor\.omp_num_threads must be >= 1, got 0"),
        ("actor.timeout_s=-1", r"actor\.timeout_s must be > 0, got -1"),
        ("warmup.lr=-1", r"warmup\.lr must be >= 0, got -1"),
        ("warmup.lr=inf", r"warmup\.lr must be a finite number, got inf"),
        ("optimizer.lr=inf", r"^optimizer\.lr must be a finite number, got inf"),
        ("critic.optimizer.lr=inf", r"critic\.optimizer\.lr must be a finite number, got inf"),
        ("warmup.until_accuracy=2", r"warmup\.until_accuracy must be <= 1, got 2"),
        ("trainer.stop_at_accuracy=90", r"trainer\.stop_at_accuracy must be <= 1, got 90"),
        ("trainer.stop_at_accuracy=nan", r"trainer\.stop_at_accuracy must be .*, got nan"),
        ("warmup.test_freq=-1", r"warmup\.test_freq must be >= 0, got -1"),
        ("weight_update.bucket_bytes=0", r"weight_update\.bucket_bytes must be >= 1, got 0"),
        ("weight_update.timeout_s=0", r"weight_update\.timeout_s must be > 0, got 0"),
        (
            "weight_update.timeout_s=600",
            r"weight_update\.timeout_s must be < engine\.timeout_s=600, got 600: rank 0 must time out",
        ),
        ("trainer.test_freq=-1", r"trainer\.test_freq must be >= 0, got -1"),
        ("engine=[]", r"config key engine must be a table of keys, got \[\]"),
        ("engine.backend=[]", r"config key engine\.backend must be one of .*, got \[\]"),
        ("trainer.name=a/b", r"trainer\.name must be the name of a folder in trainer\.run_dir, without '/', got 'a/b'"),
        ("trainer.name=..", r"trainer\.name must be the name of a folder .*, got '\.\.'"),
        ("trainer.save_freq=-2", r"trainer\.save_freq must be >= -1, got -2"),
        ("trainer.save_samples=-4", r"trainer\.save_samples must be >= 0, got -4"),
        ("rollout.max_total_tokens=1023", r"^rollout\.max_total_tokens must be >= .* = 1024, got 1023"),
        ("engine.fsdp_size=2", r"^engine\.fsdp_size = 2 must divide actor\.num_workers=1"),
        (
            "engine.ulysses_sequence_parallel_size=4",
            r"^engine\.ulysses_sequence_parallel_size = 4 must divide actor\.num_workers=1",
        ),
        ("placement.engines=shared", r"placement\.engines must be 'auto', 'separate' or 'turns', got 'shared'"),
        ("trainer.max_restarts=-1", r"trainer\.max_restarts must be >= 0, got -1"),
        ("critic.num_workers=0", r"critic\.num_workers must be >= 1, got 0"),
        ("actor.router_replay.mode=R3", r"^actor\.router_replay\.mode"),
        ("rollout.device=tpu", r"rollout\.device must be 'auto', 'cpu' or 'cuda', got 'tpu'"),
        ("algorithm.options.x=3", r"unknown config key algorithm\.options; write the options as keys of \[algorithm\]"),
        (
            "algorithm.overlong_buffer_len=100000",
            r"overlong_buffer_len must be <= rollout\.response_length=\d+, got 100000",
        ),
        ("optimizer=3", r"config key optimizer must be a table of keys, got 3"),
        ("optimizer.lr.x=3", r"config key optimizer\.lr must be a valid number"),
        ("rollout.n", r"expected an argument of the form section\.key=value, got 'rollout\.n'"),
        ("model.lora.rnk=4", r"unknown config key model\.lora\.rnk; did you mean model\.lora\.rank\?"),
        ("model.lora=4", r"config key model\.lora must be a table of keys, got 4"),
        (
            "optimizer.param_groups=[{pattern='x',lr_ratio=1},{pattern='y',lr_ratios=1}]",
            r"key optimizer\.param_groups\.1\.lr_ratios; did you mean optimizer\.param_groups\.1\.lr_ratio\?",
        ),
    ],
)
def test_invalid_value_is_rejected_with_key_expectation_and_value(config_file, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(config_file, [override])


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gdpo", "reinforce_plus_plus_baseline"])
def test_one_response_per_prompt_is_refused_by_what_compares_responses(config_file, name):
    one = ["rollout.n=1", f"algorithm.adv_estimator={name}"]
    with pytest.raises(ConfigError, match=rf'^rollout\.n must be >= 2 with algorithm\.adv_estimator="{name}", which'):
        load_config(config_file, one)


@pytest.mark.parametrize("name", ["gae", "vapo", "reinforce_plus_plus", "remax", "opd", "none", "mine.py:estimate"])
def test_one_response_per_prompt_is_accepted_by_other_estimators(config_file, name):
    one = ["rollout.n=1", f"algorithm.adv_estimator={name}"]
    assert load_config(config_file, one).rollout.n == 1
    if name == "opd":  # whose second part is the advantage of GRPO
        with pytest.raises(ConfigError, match=r'^rollout\.n must be >= 2 with algorithm\.adv_estimator="opd", which'):
            load_config(config_file, [*one, "algorithm.opd_task_coef=0.5"])
    with pytest.raises(ConfigError, match=r'^rollout\.n must be >= 2 with algorithm\.filter_groups="score", which'):
        load_config(config_file, [*one, "algorithm.filter_groups=score"])


def test_other_keys_of_the_critic_optimizer_keep_its_learning_rate(config_file, tmp_path):
    config = load_config(config_file, ["critic.optimizer.weight_decay=0.0"])
    assert (config.critic.optimizer.lr, config.critic.optimizer.weight_decay) == (1e-5, 0.0)
    save_config(config, tmp_path / "saved.toml")
    assert load_config(tmp_path / "saved.toml") == config == pickle.loads(pickle.dumps(config))
    assert load_config(config_file, ["critic.optimizer.lr=1e-6"]).critic.optimizer.lr == 1e-6


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_router_replay_requires_megatron(config_file, mode, tmp_path):
    replay = f"actor.router_replay.mode={mode}"
    with pytest.raises(ConfigError, match=rf'mode="{mode}" requires engine\.backend="megatron"; the FSDP2'):
        load_config(config_file, [replay])
    config = load_config(config_file, [replay, "engine.backend=megatron"])
    assert config.policy_engine() == MegatronConfig(router_replay=True)
    save_config(config, tmp_path / "saved.toml")
    assert load_config(tmp_path / "saved.toml") == config
    assert load_config(config_file, ["engine.backend=megatron"]).policy_engine() == MegatronConfig()


def test_megatron_parallel_sizes_must_divide_workers(config_file):
    sizes = ["engine.backend=megatron", "engine.tp=2", "engine.cp=2", "actor.num_workers=6"]
    with pytest.raises(ConfigError, match=r"^engine\.tensor_model_.* = 4 must divide actor\.num_workers=6"):
        load_config(config_file, sizes)
    load_config(config_file, [*sizes, "actor.num_workers=8"])


def test_nodes_divide_the_training_workers(config_file):
    with pytest.raises(ConfigError, match=r"^trainer\.nnodes=2 must divide actor\.num_workers=3"):
        load_config(config_file, ["trainer.nnodes=2", "actor.num_workers=3"])
    load_config(config_file, ["trainer.nnodes=2", "actor.num_workers=4"])


def test_address_of_a_ray_job_is_used_and_not_overridden(config_file, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert load_config(config_file).trainer.ray_address == "10.0.0.1:6379"
    assert load_config(config_file, ["trainer.ray_address=auto"]).trainer.ray_address == "auto"


@pytest.mark.parametrize("role", ["reference", "critic", "teacher", "reward_model"])
def test_parallel_sizes_must_divide_the_processes_of_a_role(config_file, role):
    sizes = ["engine.backend=megatron", "engine.tp=2", "actor.num_workers=2"]
    with pytest.raises(ConfigError, match=rf"^engine\.tensor_model_.* = 2 must divide {role}\.num_workers=3"):
        load_config(config_file, [*sizes, f"{role}.num_workers=3"])
    config = load_config(config_file, [*sizes, f"{role}.num_workers=4"])
    assert config.training_workers() == {"actor.num_workers": 2, f"{role}.num_workers": 4}


def test_router_replay_of_engine_alone_is_rejected(config_file):
    with pytest.raises(
        ConfigError, match=r"engine\.router_replay has no effect by itself; set actor\.router_replay\.mode"
    ):
        load_config(config_file, ["engine.backend=megatron", "engine.router_replay=true"])
    with pytest.raises(ConfigError, match=r"actor\.router_replay\.mode must be 'disabled', 'R2' or 'R3', got 'R4'"):
        load_config(config_file, ["engine.backend=megatron", "actor.router_replay.mode=R4"])


def test_ranks_that_share_the_tokens_of_a_row_have_room_for_longer_rows(config_file):
    rows = ["engine.max_token_len_per_gpu=512"]
    with pytest.raises(ConfigError, match=r"must be <= 512, the tokens of a micro-batch, got 1024"):
        load_config(config_file, rows)
    load_config(config_file, [*rows, "engine.ulysses_sequence_parallel_size=2", "actor.num_workers=2"])
    megatron = [*rows, "engine.backend=megatron", "actor.num_workers=2"]
    load_config(config_file, [*megatron, "engine.cp=2"])
    with pytest.raises(ConfigError, match=r"must be <= 512, the tokens of a micro-batch, got 1024"):
        load_config(config_file, [*megatron, "engine.tp=2"])  # whose ranks share weights, not tokens


def test_reward_model_requires_room_for_one_more_token(config_file):
    rows = ["engine.max_token_len_per_gpu=1024"]
    load_config(config_file, rows)
    with pytest.raises(
        ConfigError, match=r"must be < 1024, the tokens of a micro-batch, with reward_model\.path, .*1024"
    ):
        load_config(config_file, [*rows, "reward_model.path=rm"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.num_engines=3"], r".* <= actor\.num_workers=2, got 3: each engine uses"),
        (["rollout.tensor_parallel_size=4"], r".* <= actor\.num_workers=2, got 4"),
        (["rollout.num_gpus_per_engine=0.5"], r"no rollout\.num_gpus_per_engine and actor\.num_gpus_per_worker=1"),
        (["actor.num_gpus_per_worker=0.5"], r"no rollout\.num_gpus_per_engine and actor\.num_gpus_per_worker=1"),
        (["rollout.device=cpu"], r'the same rollout\.device and engine\.device, got "cpu" and "auto"'),
        (
            ["rollout.max_staleness=1", "algorithm.bypass_mode=true", "rollout.partial_rollout=false"],
            r"rollout\.partial_rollout=true with rollout\.max_staleness=1",
        ),
        (["rollout.recompute_kv_cache=false"], r"rollout\.recompute_kv_cache=true: the memory of keys and values"),
    ],
)
def test_turns_that_are_impossible_are_refused_with_their_keys(config_file, overrides, message):
    turns = ["placement.engines=turns", "actor.num_workers=2"]
    with pytest.raises(ConfigError, match=rf'placement\.engines="turns" requires {message}'):
        load_config(config_file, [*turns, *overrides])
    load_config(config_file, [*turns, "rollout.num_engines=2", "rollout.max_staleness=1", "algorithm.bypass_mode=true"])
