import pytest
from tidemill_trainer.config_file import ConfigError, load_config, read_config
from tidemill_trainer.gpus import check_gpus, engine_gpus, placed, shares_gpus, training_gpus
from tidemill_trainer.sft.config import SFTConfig


@pytest.fixture
def check(config_file):
    def check(num_gpus, *overrides, has_training=True):
        config = load_config(config_file, overrides)
        of_training = training_gpus(config, num_gpus) if has_training else {}
        check_gpus(engine_gpus(config, num_gpus) | of_training, num_gpus)

    return check


ROLES = ["actor.num_workers=4", "critic.num_workers=2", "reference.num_workers=1", "rollout.num_engines=2"]


def test_more_gpus_than_the_cluster_has_are_refused_with_their_keys(check):
    check(11, *ROLES, "rollout.tensor_parallel_size=2")
    message = (
        r"requires 11 GPUs, 4 for rollout\.num_engines, 4 for actor\.num_workers, 1 for reference\.num_workers, "
        r"2 for critic\.num_workers, but the Ray cluster has 8; lower"
    )
    with pytest.raises(ConfigError, match=message):
        check(8, *ROLES, "rollout.tensor_parallel_size=2")


def test_engines_and_workers_that_share_a_gpu_count_with_their_fractions(check):
    fractions = ["actor.num_gpus_per_worker=0.7", "rollout.num_gpus_per_engine=0.3"]
    check(1, *fractions)
    check(3, *fractions, "critic.num_workers=2")
    with pytest.raises(ConfigError, match=r"requires 2 GPUs, .* but the Ray cluster has 1"):
        check(1, *fractions, "teacher.num_workers=1")


OFFLOADS = ("param_offload", "grad_offload", "optimizer_offload")


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "engines"),
    [
        (1, [], "turns"),
        (2, [], "separate"),
        (0, [], "separate"),  # everything on CPUs
        (1, ["engine.device=cpu", "rollout.device=cpu"], "separate"),
        (4, ["actor.num_workers=4", "rollout.num_engines=4"], "turns"),
        (4, ["actor.num_workers=4", "rollout.num_engines=2", "rollout.tensor_parallel_size=2"], "turns"),
        (8, ["actor.num_workers=4", "rollout.num_engines=4"], "separate"),
        (8, ["actor.num_workers=4", "rollout.num_engines=4", "placement.engines=turns"], "turns"),
        (4, ["actor.num_workers=4", "rollout.num_engines=5"], "separate"),  # and then refused
        (2, ["actor.num_workers=4", "rollout.num_engines=4"], "separate"),
        (4, ["actor.num_workers=4", "placement.engines=separate"], "separate"),
        (1, ["actor.num_gpus_per_worker=0.7", "rollout.num_gpus_per_engine=0.3"], "separate"),
        (1, ["rollout.max_staleness=1", "algorithm.bypass_mode=true", "rollout.partial_rollout=false"], "separate"),
    ],
)
def test_engines_use_the_gpus_of_the_workers_in_turns_where_there_are_too_few(
    config_file, num_gpus, overrides, engines
):
    config = placed(load_config(config_file, overrides), num_gpus)
    assert config.placement.engines == engines
    assert {getattr(config.engine, name) for name in OFFLOADS} == {engines == "turns"}
    if engines == "turns":
        assert engine_gpus(config, num_gpus) == {"rollout.num_engines": 0}
        assert shares_gpus(config)
        check_gpus(engine_gpus(config, num_gpus) | training_gpus(config, num_gpus), num_gpus)


def test_turns_offload_the_roles_in_the_processes_of_the_policy_alone(config_file):
    config = placed(load_config(config_file, ["placement.engines=turns", "critic.num_workers=1"]), 2)
    assert (config.reference.param_offload, config.critic.param_offload) == (True, False)
    always = placed(load_config(config_file, ["placement.engines=turns", "engine.offload_policy=true"]), 1)
    assert not any(getattr(always.engine, name) for name in OFFLOADS)
    resident = placed(load_config(config_file, ["placement.engines=turns", "placement.offload=false"]), 1)
    assert not any(getattr(resident.engine, name) for name in OFFLOADS)
    assert not resident.reference.param_offload


def test_engines_without_training_have_their_own_gpus(config_file):
    config = placed(load_config(config_file, ["placement.engines=turns"]), 1, has_training=False)
    assert config.placement.engines == "separate"


def test_processes_on_cpus_require_no_gpus(check):
    check(0, *ROLES)
    check(2, *ROLES, "engine.device=cpu")
    check(2, *ROLES, has_training=False)
    with pytest.raises(ConfigError, match=r"requires 7 GPUs, .* has 0"):
        check(0, *ROLES, "engine.device=cuda")


def test_fine_tuning_requires_the_gpus_of_its_workers_alone(config_file):
    config = read_config(SFTConfig, config_file, ["actor.num_workers=4"])
    check_gpus(training_gpus(config, 4), 4)
    with pytest.raises(
        ConfigError, match=r"4 GPUs, 4 for actor\.num_workers, but the Ray cluster has 2; lower these numbers$"
    ):
        check_gpus(training_gpus(config, 2), 2)
