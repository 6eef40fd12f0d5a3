import pytest
from tidemill_engines.megatron.config import MegatronConfig
from tidemill_trainer.actor import engine_config
from tidemill_trainer.cli import DEMO_CONFIG, main
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, load_config, parse_config, save_config
from tidemill_trainer.config_keys import RENAMED, SHORT, paths_of


@pytest.fixture
def empty(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n')
    return path


def test_overrides_change_the_file_and_keep_types(empty):
    config = load_config(empty, ["optimizer.lr=1", "data.train_files=['a', 'b']", "trainer.name=it's", "rollout.n=4"])
    assert config.optimizer.lr == 1.0
    assert config.data.train_files == ("a", "b")
    assert config.trainer.name == "it's"
    assert config.rollout.n == 4
    assert load_config(empty, ["trainer.name=2026-01-05"]).trainer.name == "2026-01-05"


def test_a_saved_config_is_the_same_config(tmp_path):
    config = load_config(DEMO_CONFIG, ["optimizer.clip_grad=inf", "rollout.engine_args.log_level=error"])
    save_config(config, tmp_path / "resolved.toml")
    assert load_config(tmp_path / "resolved.toml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temprature=1", r"unknown config key rollout\.temprature; did you mean rollout\.temperature\?"),
        ("optimzer.lr=1", r"unknown config key optimzer; did you mean optimizer\?"),
        ("zzz=1", r"unknown config key zzz; known keys: model, data"),
        ("optimizer.lr=fast", r"optimizer\.lr must be a valid number, got 'fast'"),
        ("rollout.n=true", r"rollout\.n must be a valid integer, got True"),
        ("rollout.n='8'", r"rollout\.n must be a valid integer, got '8'"),
        ("rollout.n=1", r"rollout\.n must be >= 2 \(GRPO compares the responses to one prompt\), got 1"),
        ("actor.ppo_mini_batch_size=-4", r"actor\.ppo_mini_batch_size must be >= 1, got -4"),
        ("actor.ppo_mini_batch_size=65", r"^actor\.ppo_mini_batch_size must be <= data\.train_batch_size=64, got 65"),
        ("trainer.max_ckpt_to_keep=0", r"trainer\.max_ckpt_to_keep must be >= 1, got 0"),
        ("reward.timeout_s=0", r"reward\.timeout_s must be > 0, got 0"),
        ("trainer.seed=-1", r"trainer\.seed must be >= 0, got -1"),
        (
            "trainer.seed=18446744073709551616",
            r"trainer\.seed must be < 18446744073709551616, got 18446744073709551616",
        ),
        ("engine.max_token_len_per_gpu=100", r"must be <= engine\.max_token_len_per_gpu=100, got 1024"),
        ("trainer.stop_at_accuracy=0.5", r"trainer\.stop_at_accuracy requires data\.val_files"),
        ("rollout.top_k=0", r"rollout\.top_k must be >= 1, or -1 for all tokens, got 0"),
        ("rollout.max_total_tokens=-3", r"rollout\.max_total_tokens must be >= 1, got -3"),
        ("rollout.num_gpus_per_engine=-1", r"rollout\.num_gpus_per_engine must be > 0, got -1"),
        ("rollout.mem_fraction_static=3", r"rollout\.mem_fraction_static must be < 1, got 3"),
        ("rollout.timeout_s=0", r"rollout\.timeout_s must be > 0, got 0"),
        ("actor.clip_ratio_low=-0.2", r"actor\.clip_ratio_low must be >= 0, got -0\.2"),
        ("actor.clip_ratio_high=-0.2", r"actor\.clip_ratio_high must be >= 0, got -0\.2"),
        ("actor.entropy_coeff=nan", r"actor\.entropy_coeff must be a finite number, got nan"),
        ("actor.num_gpus_per_worker=0", r"actor\.num_gpus_per_worker must be > 0, got 0"),
        ("actor.omp_num_threads=0", r"actor\.omp_num_threads must be >= 1, got 0"),
        ("actor.timeout_s=-1", r"actor\.timeout_s must be > 0, got -1"),
        ("warmup.lr=-1", r"warmup\.lr must be >= 0, got -1"),
        ("warmup.lr=inf", r"warmup\.lr must be a finite number, got inf"),
        ("optimizer.lr=inf", r"^optimizer\.lr must be a finite number, got inf"),
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
        ("trainer.save_freq=-1", r"trainer\.save_freq must be >= 0, got -1"),
        ("trainer.save_samples=-4", r"trainer\.save_samples must be >= 0, got -4"),
        ("rollout.max_total_tokens=1023", r"^rollout\.max_total_tokens must be >= .* = 1024, got 1023"),
        ("engine.fsdp_size=2", r"^engine\.fsdp_size = 2 must divide actor\.num_workers=1"),
        (
            "engine.ulysses_sequence_parallel_size=4",
            r"^engine\.ulysses_sequence_parallel_size = 4 must divide actor\.num_workers=1",
        ),
        ("actor.router_replay.mode=R3", r"^actor\.router_replay\.mode"),
        ("rollout.device=tpu", r"rollout\.device must be 'auto', 'cpu' or 'cuda', got 'tpu'"),
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
def test_errors_name_the_key(empty, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(empty, [override])


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("algorithm.use_kl_in_reward", "this trainer has no KL term in the loss or the reward"),
        ("actor.kl_loss_coef", "this trainer has no KL term"),
        ("data.max_response_length", r"use rollout\.response_length"),
        ("trainer.total_training_steps", r"use trainer\.total_steps"),
        ("trainer.total_epochs", r"in steps, with trainer\.total_steps"),
        ("actor.grad_clip", r"use optimizer\.clip_grad"),
        ("rollout.gpu_memory_utilization", r"use rollout\.mem_fraction_static"),
        ("rollout.tensor_model_parallel_size", r"did you mean rollout\.tensor_parallel_size\?"),
        ("rollout.tp", r"use rollout\.tensor_parallel_size"),
        ("engine.tp_size", r"use engine\.tensor_model_parallel_size"),
        ("actor.lr", r"did you mean optimizer\.lr or warmup\.lr\?"),
        ("trainer.temprature", r"did you mean rollout\.temperature\?"),
        ("algorithm.use_wings", r"known keys: norm_adv_by_std_in_grpo, shuffle_rewards"),
        ("lora.rank", r"known keys: model, data"),
    ],
)
def test_an_unknown_key_gets_advice_that_does_not_change_the_experiment(empty, key, advice):
    with pytest.raises(ConfigError, match=rf"^unknown config key {key.removesuffix('.rank')}; .*{advice}"):
        load_config(empty, [f"{key}=1"])


def test_a_short_name_in_a_file_is_told_the_long_one(empty):
    empty.write_text('[model]\npath = "m"\n[engine]\ntp = 2\n')
    with pytest.raises(ConfigError, match=r"engine\.tp; use engine\.tensor_model_parallel_size in a file"):
        load_config(empty)


def test_names_of_verl_lead_to_keys_that_there_are():
    keys = set(paths_of(Config))
    assert {name for names in RENAMED.values() for name in names} | set(SHORT.values()) <= keys


def test_a_missing_key_file_or_syntax(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"config file {tmp_path / 'none.toml'} does not exist"):
        load_config("none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[model\n")
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML in UTF-8: Expected"):
        load_config(bad)
    bad.write_bytes('[model]\npath = "modèle"\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML in UTF-8: 'utf-8' codec can't decode byte"):
        load_config(bad)
    bad.write_text("")
    with pytest.raises(ConfigError, match="config key model is required"):
        load_config(bad)
    bad.write_text("[model]\n")
    with pytest.raises(ConfigError, match=r"config key model\.path is required"):
        load_config(bad)


def test_paths_may_begin_at_home(empty, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    paths = ["model.path=~/m", "data.train_files=['~/t.jsonl']", "reward.function=~/r.py:f", "trainer.run_dir=~/runs"]
    config = load_config(empty, paths)
    assert (config.model.path, config.data.train_files) == ("/home/me/m", ("/home/me/t.jsonl",))
    assert (config.reward.function, config.trainer.run_dir) == ("/home/me/r.py:f", "/home/me/runs")


def test_the_engine_is_chosen_by_its_backend(tmp_path):
    model = {"path": "m"}
    megatron = {"backend": "megatron", "tensor_model_parallel_size": 2}
    config = parse_config({"model": model, "actor": {"num_workers": 2}, "engine": megatron})
    assert config.engine == MegatronConfig(tensor_model_parallel_size=2)
    save_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config
    assert parse_config({"model": model, "engine": {"backend": "fsdp2"}}) == parse_config({"model": model})


def test_the_command_line_has_short_names_for_parallel_sizes():
    made_by_name = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 3,
        "context_parallel_size": 5,
        "expert_model_parallel_size": 6,
        "expert_tensor_parallel_size": 1,
    }
    short = [
        f"engine.{name}={size}"
        for name, size in zip(("tp", "pp", "vpp", "cp", "ep", "etp"), (2, 4, 3, 5, 6, 1), strict=True)
    ]
    config = load_config(DEMO_CONFIG, ["engine.backend=megatron", "actor.num_workers=40", *short])
    assert isinstance(config.engine, MegatronConfig)
    assert {name: getattr(config.engine, name) for name in made_by_name} == made_by_name
    recipe = load_config(DEMO_CONFIG.parent / "demo_megatron.toml")
    assert load_config(DEMO_CONFIG, ["engine.backend=megatron", "engine.tp=2"]) == recipe
    with pytest.raises(ConfigError, match=r'engine\.tensor_model_parallel_size requires engine\.backend="megatron"'):
        load_config(DEMO_CONFIG, ["engine.tp=2"])


def test_the_command_takes_keys_before_and_after_options(empty, capsys):
    for args in (["trainer.x=1", "--resume"], ["--resume", "trainer.x=1"]):
        assert main(["train", str(empty), *args, "--shuffle-rewards"]) == 1
        assert "unknown config key trainer.x" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(empty), "--resume", "trainer.seed=1", "--bogus"])
    assert "unrecognized arguments: --bogus" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(empty), "--res"])
    assert "unrecognized arguments: --res" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_router_replay_needs_an_engine_that_has_it(empty, mode, tmp_path):
    replay = f"actor.router_replay.mode={mode}"
    with pytest.raises(ConfigError, match=rf'mode="{mode}" requires engine\.backend="megatron"; the FSDP2'):
        load_config(empty, [replay])
    config = load_config(empty, [replay, "engine.backend=megatron"])
    assert engine_config(config) == MegatronConfig(router_replay=True)
    save_config(config, tmp_path / "saved.toml")
    assert load_config(tmp_path / "saved.toml") == config
    assert engine_config(load_config(empty, ["engine.backend=megatron"])) == MegatronConfig()


def test_megatron_divides_the_workers(empty):
    sizes = ["engine.backend=megatron", "engine.tp=2", "engine.cp=2", "actor.num_workers=6"]
    with pytest.raises(ConfigError, match=r"^engine\.tensor_model_.* = 4 must divide actor\.num_workers=6"):
        load_config(empty, sizes)
    load_config(empty, [*sizes, "actor.num_workers=8"])


def test_router_replay_of_the_engine_alone_is_refused(empty):
    with pytest.raises(
        ConfigError, match=r"engine\.router_replay has no effect by itself; set actor\.router_replay\.mode"
    ):
        load_config(empty, ["engine.backend=megatron", "engine.router_replay=true"])
    with pytest.raises(ConfigError, match=r"actor\.router_replay\.mode must be 'disabled', 'R2' or 'R3', got 'R4'"):
        load_config(empty, ["engine.backend=megatron", "actor.router_replay.mode=R4"])


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"backend": "fsdp3"}, r"engine\.backend must be one of fsdp2, megatron, got 'fsdp3'"),
        (
            {"backend": "megatron", "tensor_parallel_size": 2},
            r"unknown config key engine\.tensor_parallel_size; did you mean engine\.\w*tensor\w*\?",
        ),
        ({"tensor_model_parallel_size": 2}, r'tensor_model_parallel_size requires engine\.backend="megatron"'),
        ({"backend": "megatron", "fsdp_size": 2}, r'engine\.fsdp_size requires engine\.backend="fsdp2"'),
        ({"backend": "megatron", "seed": "x"}, r"config key engine\.seed must be a valid integer, got 'x'"),
        ({"backend": "megatron", "sequence_parallel": True}, "config key engine: .*sequence_parallel needs"),
    ],
)
def test_a_wrong_engine_section_is_told(engine, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"model": {"path": "m"}, "engine": engine})
