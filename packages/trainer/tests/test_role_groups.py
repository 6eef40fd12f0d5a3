"""Roles with processes of their own compute what they compute in the processes of the policy, with real Ray actors."""

import psutil
import pytest
import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_dispatch import WorkerDiedError
from tidemill_testing import tiny_reward_model
from tidemill_trainer.stalls.process import registered

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PPO = [
    "algorithm.adv_estimator=gae",
    "algorithm.kl_loss_coef=0.1",
    "critic.optimizer.lr=1e-3",
    "critic.ppo_epochs=2",
    "actor.ppo_mini_batch_size=2",
    "actor.num_workers=1",
]
COLUMNS = ("old_log_probs", "values", "ref_log_prob")


def two_steps(learner, rows):
    """Make two steps; return the metrics of each, without times and memory, and the columns of all models after it."""
    trained, episodes = rows
    metrics, columns = [], []
    batch = learner.infer(trained)
    for step in (1, 2):
        batch, of_rewards = learner.add_advantages(batch, episodes)
        found = of_rewards | learner.update(batch, step)[1]
        metrics.append({name: value for name, value in found.items() if not name.startswith(("perf/", "timing_s/"))})
        batch = learner.infer(trained)
        columns.append({name: ragged.values(batch[name]) for name in COLUMNS})
    return metrics, columns


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_roles_of_one_rank_compute_the_same_in_processes_of_their_own(learner, rows, backend):
    metrics, columns = two_steps(learner(f"engine.backend={backend}", *PPO), rows)
    own = ["critic.num_workers=1", "reference.num_workers=1"]
    own_metrics, own_columns = two_steps(learner(f"engine.backend={backend}", *PPO, *own), rows)
    assert own_metrics == metrics
    assert metrics[1].keys() >= {"critic/vf_loss", "critic/grad_norm", "actor/kl_loss", "actor/grad_norm"}
    for own_column, column in zip(own_columns, columns, strict=True):
        for name in COLUMNS:
            assert torch.equal(own_column[name], column[name]), name


def test_checkpoint_moves_between_shared_and_own_processes(learner, rows, tmp_path):
    trained, episodes = rows
    rows = trained[:15], episodes  # which two ranks do not divide
    shared = learner(*PPO)
    two_steps(shared, rows)
    shared.save_checkpoint(tmp_path / "of_shared")
    assert shared.finish_checkpoint(waits=True)
    metrics, columns = two_steps(shared, rows)

    own = learner(*PPO, "critic.num_workers=2")
    own.load_checkpoint(tmp_path / "of_shared")
    own_metrics, own_columns = two_steps(own, rows)
    for step in (0, 1):
        assert own_metrics[step] == pytest.approx(metrics[step], rel=1e-5, abs=1e-5)
        for name in COLUMNS:
            torch.testing.assert_close(own_columns[step][name], columns[step][name], rtol=1e-5, atol=1e-5)

    own.save_checkpoint(tmp_path / "of_own")
    assert own.finish_checkpoint(waits=True)
    shared.load_checkpoint(tmp_path / "of_own")
    restored = shared.infer(rows[0])
    for name in COLUMNS:
        torch.testing.assert_close(ragged.values(restored[name]), own_columns[1][name], rtol=1e-6, atol=1e-6)


def test_teacher_alone_is_called_where_the_policy_computes_nothing(learner, rows, assets):
    trained, _ = rows
    log_probs = DataProto.from_dict({"rollout_log_probs": ragged.like(-torch.ones(64), trained["responses"])})
    path = assets[0].replace("model.path", "teacher.path")
    distill = ["algorithm.adv_estimator=opd", path, "actor.num_workers=1"]
    made = learner(*distill, "algorithm.bypass_mode=true", "teacher.num_workers=2")
    inferred = made.infer(trained.union(log_probs))
    assert torch.equal(ragged.values(inferred["old_log_probs"]), -torch.ones(64))
    expected = learner(*distill).infer(trained)["teacher_log_prob"]
    torch.testing.assert_close(ragged.values(inferred["teacher_log_prob"]), ragged.values(expected))


def test_reward_model_of_its_own_processes_scores_training_and_validation(learner, rows, tmp_path):
    trained, _ = rows
    path = tiny_reward_model(tmp_path / "reward_model", "qwen2", vocab_size=15)
    scored = ["actor.num_workers=1", f"reward_model.path={path}"]
    own = learner(*scored, "reward_model.num_workers=1")
    scores = learner(*scored).infer(trained)["rm_scores"]
    assert torch.equal(own.infer(trained)["rm_scores"], scores)
    assert torch.equal(own.score(trained)["rm_scores"], scores)


def test_death_of_a_critic_during_the_update_names_its_group(learner, rows, tmp_path):
    trained, episodes = rows
    made = learner(*PPO, "critic.num_workers=1")
    batch, _ = made.add_advantages(made.infer(trained), episodes)
    [critic] = [each for each in registered(tmp_path) if each.name == "critic_0"]
    psutil.Process(critic.pid).kill()
    with pytest.raises(WorkerDiedError, match="rank 0 of group 'critic"):
        made.update(batch, step=1)
