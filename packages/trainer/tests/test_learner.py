"""The columns in the batches of a step."""

import numpy as np
import pytest
import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_trainer.checkpoints import CheckpointError, Checkpoints
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config_file import load_config
from tidemill_trainer.learner import Learner
from tidemill_trainer.role_groups import RoleGroups

N, ROWS = 4, 8
ROLLOUT_EXPERT, ROUTER_EXPERT = 5, 7


class Done:
    """The future of a call that has finished."""

    def __init__(self, result, on_get=None):
        self.result = result
        self.on_get = on_get

    def get(self):
        if self.on_get is not None:
            self.on_get()
        return self.result


class Actor:
    """Computes log-probs like the workers. With router replay, it returns the given experts, or else the router's."""

    def __init__(self, *, replays):
        self.replays = replays
        self.computed = []
        self.updates = []

    def dp_size(self, mesh_name):
        return 1

    def infer(self, batch):
        self.computed.append(batch)
        columns = {
            name: ragged.like(torch.zeros(3 * ROWS), batch["responses"]) for name in ("old_log_probs", "entropy")
        }
        if self.replays:
            given = batch["routed_experts"] if "routed_experts" in batch.batch else experts(batch, -1)
            values = ragged.values(given)
            columns["routed_experts"] = ragged.like(torch.where(values < 0, ROUTER_EXPERT, values), given)
        return Done(DataProto.from_dict(columns))

    def load_checkpoint(self, folder):
        pass

    def update_actor(self, batch):
        self.updates.append(batch)
        return Done([{"actor/pg_loss": 0.0}])


def scored():
    """Return the episodes of the batch."""
    columns = {"episode": torch.arange(ROWS), "scores": torch.arange(ROWS) % 2.0}
    return DataProto.from_dict(columns, {"uid": np.array([f"{row // N}" for row in range(ROWS)], dtype=object)})


def experts(batch, number):
    """Return [B, j, layers, top_k] with `number` for all tokens except the last of each row, which have -1."""
    column = torch.full((5 * ROWS, 2, 2), number, dtype=torch.int32)
    column[4::5] = -1
    return ragged.like(column, batch["input_ids"])


def rollouts(*, with_experts):
    tokens, lengths = torch.arange(5 * ROWS) % 12 + 3, [5] * ROWS
    input_ids = ragged.ragged(tokens, lengths)
    responses = ragged.ragged(tokens.view(ROWS, 5)[:, 2:].reshape(-1), [3] * ROWS)
    columns = {"input_ids": input_ids, "responses": responses, "episode": torch.arange(ROWS)}
    columns["response_mask"] = ragged.like(torch.ones(3 * ROWS), responses)
    batch = DataProto.from_dict(columns)
    return (
        batch.union(DataProto.from_dict({"routed_experts": experts(batch, ROLLOUT_EXPERT)})) if with_experts else batch
    )


@pytest.mark.parametrize("mode", ["disabled", "R2", "R3"])
def test_router_replay_mode_selects_the_experts_of_old_log_probs_and_update(mode):
    overrides = ["model.path=m", "engine.backend=megatron", f"actor.router_replay.mode={mode}"]
    config = load_config(
        DEMO_CONFIG, [*overrides, "actor.ppo_mini_batch_size=1", f"rollout.n={N}", "data.train_batch_size=2"]
    )
    actor = Actor(replays=mode != "disabled")
    learner = Learner(config, RoleGroups(config, actor, {}))
    batch, _ = learner.add_advantages(learner.infer(rollouts(with_experts=mode == "R3")), scored())
    assert learner.update(batch, step=1)[1] == {"actor/pg_loss": 0.0}
    mini_batches = actor.updates
    assert len(mini_batches) == ROWS // N

    [computed] = actor.computed
    assert ("routed_experts" in computed.batch) == (mode == "R3")
    assert all(("routed_experts" in mini_batch.batch) == (mode != "disabled") for mini_batch in mini_batches)
    if mode == "disabled":
        return
    expected = ROLLOUT_EXPERT if mode == "R3" else ROUTER_EXPERT
    for mini_batch in mini_batches:
        sent = ragged.values(mini_batch["routed_experts"]).view(N, 5, 2, 2)
        assert (sent[:, :4] == expected).all()
        assert (sent[:, 4] == ROUTER_EXPERT).all()  # the rollout has no experts for the last tokens


def test_shuffled_rewards_are_shuffled_with_their_components_and_penalties():
    overrides = ["model.path=m", "algorithm.adv_estimator=gdpo", 'algorithm.reward_components=["a","b"]']
    overrides += ["algorithm.overlong_buffer_len=3", "rollout.response_length=4", "algorithm.shuffle_rewards=true"]
    config = load_config(DEMO_CONFIG, [*overrides, f"rollout.n={N}", "data.train_batch_size=2"])
    learner = Learner(config, RoleGroups(config, Actor(replays=False), {}))
    batch = learner.infer(rollouts(with_experts=False))
    episodes, order = scored(), torch.arange(ROWS).flip(0)
    components = torch.arange(2.0 * ROWS).view(ROWS, 2)
    episodes = episodes.union(DataProto.from_dict({"reward_components": components, "order": order}))
    batch, _ = learner.add_advantages(batch, episodes)
    penalty = -(3 - (4 - 3)) / 3
    assert torch.equal(batch["reward_components"], components[order])
    assert torch.allclose(batch["rewards"], episodes["scores"][order] + penalty)


def test_adaptive_kl_coefficient_counts_the_episodes_that_are_trained_on():
    """Episodes without rows are those of groups that `filter_groups` drops. Equation of `AdaptiveKLController`."""
    overrides = ["model.path=m", "algorithm.adv_estimator=reinforce_plus_plus", "algorithm.kl_coef=0.5"]
    overrides += ["algorithm.target_kl=0.1", f"algorithm.horizon={10 * ROWS}"]
    config = load_config(DEMO_CONFIG, [*overrides, f"rollout.n={N}", "data.train_batch_size=2"])
    learner = Learner(config, RoleGroups(config, Actor(replays=False), {}))
    batch = rollouts(with_experts=False)
    log_probs = {"old_log_probs": 0.0, "ref_log_prob": -1.0}  # a KL of 1, ten times the target
    columns = {
        name: ragged.like(torch.full((3 * ROWS,), value), batch["responses"]) for name, value in log_probs.items()
    }
    batch = batch.union(DataProto.from_dict(columns))
    tensors = {"episode": torch.arange(ROWS, 3 * ROWS), "scores": torch.ones(2 * ROWS)}
    dropped = DataProto.from_dict(tensors, {"uid": np.array(["dropped"] * 2 * ROWS, dtype=object)})
    episodes = DataProto.concat([scored(), dropped])
    coefficients = [learner.add_advantages(batch, episodes)[1]["actor/reward_kl_penalty_coeff"] for _ in range(2)]
    assert coefficients == [0.5, pytest.approx(0.5 * (1 + 0.2 * ROWS / (10 * ROWS)))]


@pytest.mark.parametrize("content", [None, '{"kl_coef": 0.'])
def test_damaged_kl_coefficient_of_a_checkpoint_is_reported(tmp_path, content):
    overrides = ["model.path=m", "algorithm.adv_estimator=reinforce_plus_plus", "algorithm.kl_coef=0.5"]
    config = load_config(DEMO_CONFIG, [*overrides, "algorithm.target_kl=0.1"])
    learner = Learner(config, RoleGroups(config, Actor(replays=False), {}))
    if content is not None:
        (tmp_path / "kl.json").write_text(content)
    loading = Checkpoints(tmp_path, max_to_keep=1).loading(str(tmp_path))
    with (
        pytest.raises(CheckpointError, match=rf"load the checkpoint {tmp_path}: .*{tmp_path}/kl\.json"),
        loading,
    ):
        learner.load_checkpoint(str(tmp_path))


def test_column_that_a_loss_reads_is_part_of_its_mini_batches(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        'from tidemill_algorithms.losses import reads\n@reads("entropy")\ndef mine(log_probs, batch): ...\n'
    )
    sizes = [f"rollout.n={N}", "data.train_batch_size=2"]
    config = load_config(DEMO_CONFIG, ["model.path=m", f"algorithm.policy_loss={file}:mine", *sizes])
    actor = Actor(replays=False)
    learner = Learner(config, RoleGroups(config, actor, {}))
    batch, _ = learner.add_advantages(learner.infer(rollouts(with_experts=False)), scored())
    learner.update(batch, step=1)
    [mini_batch] = actor.updates
    assert torch.equal(ragged.values(mini_batch["entropy"]), torch.zeros(3 * ROWS))


class Recorder:
    """Records when its updates are sent and waited for."""

    def __init__(self, name, events):
        self.name = name
        self.events = events

    def dp_size(self, mesh_name):
        return 1

    def update(self, batch):
        self.events.append(f"send {self.name}")
        return Done([{f"{self.name}/loss": float(len(batch))}], lambda: self.events.append(f"wait {self.name}"))

    update_critic = update_actor = update


@pytest.mark.parametrize("is_own", [True, False])
def test_critic_with_processes_of_its_own_is_updated_while_the_policy_is(is_own):
    ppo = ["algorithm.adv_estimator=gae", "actor.ppo_mini_batch_size=1", "critic.ppo_epochs=2"]
    config = load_config(DEMO_CONFIG, ["model.path=m", f"rollout.n={N}", "data.train_batch_size=2", *ppo])
    events = []
    actor, critic = Recorder("actor", events), Recorder("critic", events)
    learner = Learner(config, RoleGroups(config, actor, {"critic": critic} if is_own else {}))
    zeros = ragged.like(torch.zeros(3 * ROWS), rollouts(with_experts=False)["responses"])
    columns = dict.fromkeys(("old_log_probs", "values", "entropy"), zeros)
    batch, _ = learner.add_advantages(rollouts(with_experts=False).union(DataProto.from_dict(columns)), scored())
    _, metrics = learner.update(batch, step=1)
    if is_own:  # two mini-batches of the policy, two epochs of the critic
        together = ["send critic", "send actor", "wait critic", "wait actor"]
        assert events == [*together, *together, *["send critic", "wait critic"] * 2]
        assert metrics.pop("timing_s/update_critic") > 0  # of the last two alone
        assert metrics == {"critic/loss": 4.0, "actor/loss": 4.0}
    else:
        assert events == ["send actor", "wait actor"] * 6
