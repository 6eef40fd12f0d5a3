"""Processes of a run."""

import os

import pytest
from tidemill_dispatch import Dispatch, Worker, register
from tidemill_dispatch.ray import RayClassWithInitArgs
from tidemill_trainer.config_file import load_config
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.sft.cluster import SFTCluster


class Environment(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


class Cluster(SFTCluster):
    def _workers(self) -> dict[str, tuple[RayClassWithInitArgs, int, float]]:
        return {"actor": (RayClassWithInitArgs(Environment), self._config.actor.num_workers, 0)}


@pytest.mark.parametrize(("of_user", "expected"), [(None, "1"), ("8", "8")])
def test_training_workers_start_with_the_environment_of_their_engine(
    ray_cluster, config_file, tmp_path, progress, monkeypatch, of_user, expected
):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)  # SGLang sets it where it starts an engine, as other tests do
    if of_user is not None:
        monkeypatch.setenv(name, of_user)
    config = load_config(config_file, ["engine.backend=megatron", "engine.tp=2", "actor.num_workers=2"])
    with Cluster(config, RunDir(tmp_path), progress) as cluster:
        assert set(cluster.workers.variable(name)) == {expected}
