"""Router replay: the experts in the batches of a step."""

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tidemill_dataproto import DataProto, ragged
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config_file import load_config
from tidemill_trainer.demo.addition import CHARACTERS
from tidemill_trainer.demo.model import piece_tokenizer
from tidemill_trainer.inputs import Inputs
from tidemill_trainer.progress import Progress
from tidemill_trainer.rollout.episode_pool import Episodes
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.trainer import Trainer
from tidemill_trainer.waits import Waits, waits_of

N, ROWS = 4, 8
ROLLOUT_EXPERT, ROUTER_EXPERT = 5, 7


class Actor:
    """Computes log-probs like the workers. With router replay, it returns the given experts, or else the router's."""

    def __init__(self, *, replays):
        self.replays = replays
        self.computed = []

    def dp_size(self, mesh_name):
        return 1

    def compute_log_prob(self, batch):
        self.computed.append(batch)
        columns = {
            name: ragged.like(torch.zeros(3 * ROWS), batch["responses"]) for name in ("old_log_probs", "entropy")
        }
        if self.replays:
            given = batch["routed_experts"] if "routed_experts" in batch.batch else experts(batch, -1)
            values = ragged.values(given)
            columns["routed_experts"] = ragged.like(torch.where(values < 0, ROUTER_EXPERT, values), given)
        return DataProto.from_dict(columns)


def experts(batch, number):
    """Return [B, j, layers, top_k] with `number` for all tokens except the last of each row, which have -1."""
    column = torch.full((5 * ROWS, 2, 2), number, dtype=torch.int32)
    column[4::5] = -1
    return ragged.like(column, batch["input_ids"])


def rollouts(*, with_experts):
    tokens, lengths = torch.arange(5 * ROWS) % 12 + 3, [5] * ROWS
    input_ids = ragged.ragged(tokens, lengths)
    responses = ragged.ragged(tokens.view(ROWS, 5)[:, 2:].reshape(-1), [3] * ROWS)
    columns = {"input_ids": input_ids, "responses": responses, "task": torch.arange(ROWS)}
    for name in ("response_mask", "advantages"):
        columns[name] = ragged.like(torch.ones(3 * ROWS), responses)
    batch = DataProto.from_dict(columns)
    return (
        batch.union(DataProto.from_dict({"routed_experts": experts(batch, ROLLOUT_EXPERT)})) if with_experts else batch
    )


@pytest.mark.parametrize("mode", ["disabled", "R2", "R3"])
def test_router_replay_mode_selects_the_experts_of_old_log_probs_and_update(mode, tmp_path):
    overrides = ["model.path=m", "engine.backend=megatron", f"actor.router_replay.mode={mode}"]
    config = load_config(
        DEMO_CONFIG, [*overrides, "actor.ppo_mini_batch_size=1", f"rollout.n={N}", "data.train_batch_size=2"]
    )
    actor = Actor(replays=mode != "disabled")
    inputs = Inputs(tokenizer=piece_tokenizer(CHARACTERS), train=rollouts(with_experts=False), val=None)
    watch = SimpleNamespace(waits=Waits(waits_of(config)))
    cluster = SimpleNamespace(actor=actor, episodes=SimpleNamespace(load=lambda config: None), watch=watch)
    trainer = Trainer(config, cluster, inputs, RunDir(tmp_path), Progress(Console(file=io.StringIO())))
    rows = rollouts(with_experts=mode == "R3")
    batch = trainer._add_old_log_probs(Episodes(rows=rows, summaries=[], num_generated=0, num_lost=0, num_restarts=0))
    mini_batches = list(trainer._mini_batches(batch, step=1))
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
