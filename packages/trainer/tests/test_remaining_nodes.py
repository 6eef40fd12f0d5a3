import pytest
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config_file import ConfigError, load_config
from tidemill_trainer.remaining_nodes import changes, fitted


def nodes(*sizes):
    """Return nodes with CPUs and GPUs."""
    return {f"node{number}": {"CPU": cpus, "GPU": gpus} for number, (cpus, gpus) in enumerate(sizes)}


@pytest.fixture
def config(assets):
    def make(*overrides):
        return load_config(DEMO_CONFIG, [*assets, "trainer.ray_address=auto", *overrides])

    return make


@pytest.mark.parametrize(
    ("overrides", "left", "changed"),
    [
        ("trainer.nnodes=2 actor.num_workers=2 rollout.num_engines=2", [(3, 0), (2, 0)], ""),
        (
            "trainer.nnodes=2 actor.num_workers=2 rollout.num_engines=2",
            [(3, 0)],
            "trainer.nnodes=1 (before: 2), actor.num_workers=1 (before: 2), rollout.num_engines=1 (before: 2)",
        ),
        # the training workers are kept where engines can make room
        (
            "trainer.nnodes=2 actor.num_workers=16 rollout.num_engines=16 episode.num_workers=4",
            [(64, 8), (64, 8), (64, 8)],
            "rollout.num_engines=8 (before: 16)",
        ),
        (
            "trainer.nnodes=2 actor.num_workers=16 rollout.num_engines=16 episode.num_workers=4",
            [(64, 8), (64, 8)],
            "actor.num_workers=8 (before: 16), rollout.num_engines=8 (before: 16)",
        ),
        # engines and training workers in turns, if that is what "auto" selects
        ("trainer.nnodes=3 actor.num_workers=6", [(9, 6)], "trainer.nnodes=1 (before: 3)"),
        # parallel sizes must divide the number of training workers
        (
            "trainer.nnodes=2 actor.num_workers=8 engine.backend=megatron engine.tp=2",
            [(64, 7)],
            "trainer.nnodes=1 (before: 2), actor.num_workers=4 (before: 8)",
        ),
        (
            "actor.num_workers=1 episode.num_workers=4 rollout.num_engines=2",
            [(4, 0)],
            "episode.num_workers=1 (before: 4)",
        ),
    ],
)
def test_run_continues_with_what_has_room(config, overrides, left, changed):
    before = config(*overrides.split())
    after = fitted(before, nodes(*left))
    assert changes(before, after) == changed


def test_error_has_what_is_missing_for_the_smallest_run(config):
    before = config("trainer.nnodes=2", "actor.num_workers=4", "critic.num_workers=2", "algorithm.adv_estimator=gae")
    with pytest.raises(ConfigError, match="the run cannot continue on the 1 nodes that are left: ") as error:
        fitted(before, nodes((2, 0)))
    assert "no room for critic.num_workers=2" in str(error.value)
    assert "1 CPU missing" in str(error.value)
