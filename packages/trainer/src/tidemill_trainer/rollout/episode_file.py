"""Episodes in a file: their rows in DataProto's format, and everything else as JSON in it."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tidemill_dataproto import DataProto
from tidemill_rollout import Outcome, Problem
from tidemill_rollout.fork import Fork

from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary, EpisodeTask, Failure

_NAME = "episodes"


def save_episodes(path: Path, episodes: Episodes, **info: Any) -> None:
    """Write episodes to a file, which appears when it is complete.

    Args:
        path: the file; its folder must exist.
        episodes: the episodes. Of their problems, only id, ordinal and data source are written.
        info: further values that have a JSON form, by name.
    """
    rows = DataProto() if episodes.rows is None else episodes.rows.select()
    others = {
        "has_rows": episodes.rows is not None,
        "summaries": [_summary(each) for each in episodes.summaries],
        "baselines": [_summary(each) for each in episodes.baselines],
        "dropped": list(episodes.dropped.items()),
        "num_generated": episodes.num_generated,
        "num_lost": episodes.num_lost,
        "num_restarts": episodes.num_restarts,
    }
    rows.meta_info = {_NAME: others, "info": info}
    rows.save_to_disk(path)


def load_episodes(path: Path) -> tuple[Episodes, dict[str, Any]]:
    """Return the episodes of a file and its further values; the prompts of the problems are empty.

    Raises:
        ValueError: the file is truncated, damaged or of another kind.
        FileNotFoundError: there is no such file.
    """
    rows = DataProto.load_from_disk(path)
    if _NAME not in rows.meta_info:
        raise ValueError(f"expected a file with episodes, got a batch without them: {path}")
    found: dict[str, Any] = rows.meta_info.pop(_NAME)
    info: dict[str, Any] = rows.meta_info.pop("info")
    episodes = Episodes(
        rows=rows if found["has_rows"] else None,
        summaries=[_read_summary(each) for each in found["summaries"]],
        baselines=[_read_summary(each) for each in found["baselines"]],
        dropped=dict(found["dropped"]),
        num_generated=found["num_generated"],
        num_lost=found["num_lost"],
        num_restarts=found["num_restarts"],
    )
    return episodes, info


def _summary(summary: EpisodeSummary) -> dict[str, Any]:
    task, problem, outcome = summary.task, summary.task.problem, summary.outcome
    return {
        "problem": {"id": problem.id, "ordinal": problem.ordinal, "data_source": problem.data_source},
        "task": {"number": task.number, "sample": task.sample, "seed": task.seed, "is_shown": task.is_shown},
        "outcome": asdict(outcome),
        "failures": [asdict(failure) for failure in summary.failures],
        "counts": dict(summary.counts),
        "seconds": summary.seconds,
        "forks": [asdict(fork) for fork in summary.forks],
    }


def _read_summary(found: Mapping[str, Any]) -> EpisodeSummary:
    return EpisodeSummary(
        task=EpisodeTask(problem=Problem(prompt="", **found["problem"]), **found["task"]),
        outcome=Outcome(**found["outcome"]),
        failures=[Failure(**failure) for failure in found["failures"]],
        counts=found["counts"],
        seconds=found["seconds"],
        forks=[Fork(**fork) for fork in found["forks"]],
    )
