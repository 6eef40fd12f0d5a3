import numpy as np
import pytest
import torch
from tidemill_dataproto import DataProto
from tidemill_rollout import Outcome, Problem
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config_file import load_config
from tidemill_trainer.episode_scores import add_scores
from tidemill_trainer.episodes import EpisodeError
from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary, EpisodeTask

CONFIG = load_config(DEMO_CONFIG, ["model.path=m", "reward_model.path=rm", "reward_model.coef=2.0"])


def scored(outcomes, rows):
    """Summaries of these episodes; `rows` are (episode, branch, score)."""
    numbers, branches, scores = zip(*rows, strict=True)
    columns = {"episode": torch.tensor(numbers), "rm_scores": torch.tensor(scores)}
    batch = DataProto.from_dict(columns, {"branch": np.array(branches, dtype=object)})
    summaries = [
        EpisodeSummary(task=EpisodeTask(number=number, problem=Problem(prompt="1+1=", id=str(number))), outcome=outcome)
        for number, outcome in enumerate(outcomes)
    ]
    episodes = Episodes(rows=batch, summaries=summaries, num_generated=0, num_lost=0, num_restarts=0)
    return add_scores(episodes, batch, CONFIG).summaries


def test_score_of_an_episode_is_that_of_the_last_row_of_its_main_branch():
    outcome = Outcome(reward=1.0)
    rows = [(0, "main", 0.1), (0, "main", 0.25), (0, "helper", 9.0), (2, "helper", 0.5), (2, "helper", 0.75)]
    first, without_row, branches = scored([outcome] * 3, rows)
    assert (first.outcome.reward, first.outcome.metrics) == (1.5, {"rm_score": 0.25, "acc": 1.0})
    assert without_row.outcome == outcome
    assert branches.outcome.reward == 2.5


def test_accuracy_and_status_of_an_episode_do_not_change():
    outcome = Outcome(reward=0.5, status="truncated", reason="length: 3", metrics={"acc": 0.0, "format": 1.0})
    [summary] = scored([outcome], [(0, "main", -1.0)])
    assert summary.acc == 0.0
    assert summary.outcome.metrics == {"acc": 0.0, "format": 1.0, "rm_score": -1.0}
    assert (summary.outcome.status, summary.outcome.reward) == ("truncated", -1.5)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 3e38])
def test_score_that_is_not_finite_stops_the_run(score):
    with pytest.raises(EpisodeError, match=r"episode 0/0: expected a finite score .*reward_model\.path=rm and engine"):
        scored([Outcome(reward=0.0)], [(0, "main", score)])
