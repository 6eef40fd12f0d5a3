"""A run whose reference and critic have processes of their own: Ray actors, FSDP2, and a stock SGLang engine."""

from dataclasses import replace

import psutil
import pytest
from tidemill_trainer.cluster import Cluster
from tidemill_trainer.inputs import load_inputs
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.stalls.process import registered
from tidemill_trainer.trainer import Trainer

pytestmark = [pytest.mark.ray, pytest.mark.sglang, pytest.mark.timeout(600), pytest.mark.xdist_group("cluster")]


def test_run_with_processes_for_each_role_resumes_and_stops_them(make_config, quiet, tmp_path):
    config = make_config(
        "algorithm.adv_estimator=gae",
        "algorithm.kl_loss_coef=0.1",
        "actor.num_workers=1",
        "critic.num_workers=1",
        "reference.num_workers=1",
        "data.train_batch_size=2",
        "warmup.max_steps=1",
        "trainer.total_steps=2",
        "trainer.save_freq=1",
    )
    inputs = load_inputs(config, quiet)
    assert inputs.val is not None
    inputs = replace(inputs, val=inputs.val[:4])
    run = RunDir(tmp_path)
    with Cluster(config, run, quiet) as cluster, cluster.watch():
        cluster.wait_ready()
        processes = {each.name: psutil.Process(each.pid) for each in registered(run.logs)}
        assert processes.keys() >= {"actor_0", "critic_0", "reference_0", "rollout_0"}
        first = replace(config, trainer=replace(config.trainer, total_steps=1))
        Trainer(first, cluster, inputs, run, quiet).fit()
        assert (run.path / "checkpoints" / "step_000001" / "critic").is_dir()
        Trainer(config, cluster, inputs, run, quiet).fit()  # resumes
    assert not any(process.is_running() for process in processes.values())
    steps = {row["step"]: row for row in run.read_metrics() if row["phase"] == "rl" and row["step"] > 0}
    assert steps.keys() == {1, 2}
    assert steps[1]["actor/kl_loss"] == 0.0
    assert steps[2]["actor/kl_loss"] > 0.0
    assert steps[2]["critic/vf_loss"] > 0.0
    assert all((run.logs / f"{name}_0.log").is_file() for name in ("critic", "reference"))
