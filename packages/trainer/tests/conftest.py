import io
import logging
import os

import numpy as np
import pytest
import ray
import torch
from rich.console import Console
from tidemill_dataproto import DataProto, ragged
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tidemill_trainer.actor import ActorWorker
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config_file import load_config
from tidemill_trainer.demo import write_assets
from tidemill_trainer.demo.model import piece_tokenizer
from tidemill_trainer.learner import Learner
from tidemill_trainer.progress import Progress
from tidemill_trainer.role_groups import RoleGroups
from tidemill_trainer.role_worker import RoleWorker
from tidemill_trainer.roles import own_workers

N, PROBLEMS = 4, 4


@pytest.fixture(scope="session")
def tokenizer():
    return piece_tokenizer("0123456789+=")


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    """Overrides with the paths of the demo's model and problems."""
    return write_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def ray_cluster():
    """Ray on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture
def terminal():
    """The text that `progress` prints."""
    return io.StringIO()


@pytest.fixture
def progress(terminal):
    return Progress(Console(file=terminal, width=200))


@pytest.fixture
def config_file(tmp_path):
    """A configuration with only the path of the model."""
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n')
    return path


@pytest.fixture
def learner(ray_cluster, assets, tmp_path):
    """`learner("key=value", ...)`: a learner with its processes, two for the policy unless set otherwise."""
    started = []

    def start(worker, number, *args):
        group = RayWorkerGroup(
            RayResourcePool([number], num_gpus_per_worker=0),
            RayClassWithInitArgs(worker, *args),
            name_prefix=f"{args[2] if len(args) > 2 else 'actor'}{len(started)}",
            env_vars={"OMP_NUM_THREADS": "1"},
        )
        started.append(group)
        return group

    def make(*overrides):
        sizes = [f"rollout.n={N}", f"data.train_batch_size={PROBLEMS}", "optimizer.lr=1e-3", "actor.num_workers=2"]
        config = load_config(DEMO_CONFIG, [*assets, *sizes, "warmup.max_steps=0", *overrides])
        actor = start(ActorWorker, config.actor.num_workers, config, str(tmp_path))
        own = {
            role: start(RoleWorker, number, config, str(tmp_path), role) for role, number in own_workers(config).items()
        }
        actor.init_model().get()
        made = Learner(config, RoleGroups(config, actor, own))
        made.init_reward_model()
        made.init_roles(tmp_path / "initial_policy", is_resumed=False)
        return made

    yield make
    for group in started:
        group.shutdown()


@pytest.fixture
def rows():
    """Rows of the episodes of one step, and the episodes."""
    generator = torch.Generator().manual_seed(0)
    count = N * PROBLEMS
    responses = ragged.ragged(torch.randint(3, 15, (4 * count,), generator=generator), [4] * count)
    prompts = ragged.ragged(torch.randint(3, 15, (6 * count,), generator=generator), [6] * count)
    columns = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": ragged.concat_rows(prompts, responses),
        "response_mask": ragged.like(torch.ones(4 * count), responses),
        "episode": torch.arange(count),
    }
    uid = np.array([f"{number // N}" for number in range(count)], dtype=object)
    rewards = torch.rand(count, generator=generator)
    return DataProto.from_dict(columns), DataProto.from_dict(
        {"episode": torch.arange(count), "scores": rewards}, {"uid": uid}
    )
