"""Dynamic sampling: which groups of episodes are trained on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from tidemill_dataproto import DataProto

from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary

EQUAL, SURPLUS = "equal rewards", "surplus"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFilter:
    """Keep groups with different rewards until a batch is complete (DAPO, arXiv:2503.14476, section 3.2).

    Attributes:
        num_groups: groups of a batch.
        group_size: episodes of a group; episode k is in group k // group_size.
        metric: number that must differ within a group: "acc" or "score", the reward. None keeps every group.
    """

    num_groups: int
    group_size: int
    metric: Literal["acc", "score"] | None

    def num_missing(self, summaries: Sequence[EpisodeSummary]) -> int:
        """Return how many further groups to generate for a batch, at most a whole one; 0 if it is complete.

        The share of groups to keep is expected to be that of the groups so far.
        """
        num_seen = len({self._group(summary) for summary in summaries})
        num_kept = len(self._kept(summaries))
        missing = self.num_groups - num_kept
        if num_kept == 0:
            return missing
        return 0 if missing <= 0 else min(math.ceil(missing * num_seen / num_kept), self.num_groups)

    def apply(self, episodes: Episodes) -> Episodes:
        """Drop the rows of groups with equal rewards, and of groups beyond the batch."""
        if self.metric is None:
            return episodes
        kept = self._kept(episodes.summaries)
        chosen = set(kept[: self.num_groups])
        dropped = {
            summary.task.number: SURPLUS if self._group(summary) in kept else EQUAL
            for summary in episodes.summaries
            if summary.outcome.is_trainable and self._group(summary) not in chosen
        }
        return without(episodes, dropped)

    def metrics(self, episodes: Episodes) -> dict[str, float]:
        """Return how many groups were generated, and dropped for each reason; empty without a filter."""
        if self.metric is None:
            return {}
        groups = {self._group(summary) for summary in episodes.summaries}
        reasons = {number // self.group_size: reason for number, reason in episodes.dropped.items() if number >= 0}
        counts = [*reasons.values()]
        return {
            "filter/num_groups": float(len(groups)),
            "filter/num_equal_rewards": float(counts.count(EQUAL)),
            "filter/num_surplus": float(counts.count(SURPLUS)),
        }

    def _kept(self, summaries: Sequence[EpisodeSummary]) -> list[int]:
        """Return the groups to keep, ascending. Failed episodes do not belong to a group."""
        groups = groupby(sorted(summaries, key=self._group), key=self._group)
        return [group for group, members in groups if self.metric is None or self._differs([*members])]

    def _differs(self, members: Sequence[EpisodeSummary]) -> bool:
        trainable = [each for each in members if each.outcome.is_trainable]
        values = [each.acc if self.metric == "acc" else each.outcome.reward for each in trainable]
        return len(np.unique(np.array(values, dtype=np.float32))) > 1  # training has them in float32

    def _group(self, summary: EpisodeSummary) -> int:
        return summary.task.number // self.group_size


def without(episodes: Episodes, dropped: Mapping[int, str]) -> Episodes:
    """Remove the rows of some episodes; those of shown episodes become `dropped_rows`.

    Args:
        dropped: the reasons by number.
    """
    rows, others = episodes.rows, episodes.dropped_rows
    if rows is not None:
        numbers = rows["episode"]
        shown = [each.task.number for each in episodes.summaries if each.task.is_shown and each.task.number in dropped]
        is_dropped, is_shown = (
            torch.isin(numbers, torch.tensor([*some], dtype=numbers.dtype)) for some in (dropped, shown)
        )
        others = _concat([others, rows[is_shown] if bool(is_shown.any()) else None])
        rows = None if bool(is_dropped.all()) else rows[~is_dropped]
    return replace(episodes, rows=rows, dropped={**episodes.dropped, **dropped}, dropped_rows=others)


def joined(rounds: Sequence[Episodes]) -> Episodes:
    """Join the episodes of several rounds of generation, whose numbers ascend."""
    return Episodes(
        rows=_concat([each.rows for each in rounds]),
        summaries=[summary for each in rounds for summary in each.summaries],
        num_generated=sum(each.num_generated for each in rounds),
        num_lost=sum(each.num_lost for each in rounds),
        num_restarts=sum(each.num_restarts for each in rounds),
        dropped={number: reason for each in rounds for number, reason in each.dropped.items()},
        baselines=[summary for each in rounds for summary in each.baselines],
        dropped_rows=_concat([each.dropped_rows for each in rounds]),
    )


def _concat(batches: Sequence[DataProto | None]) -> DataProto | None:
    known = [batch for batch in batches if batch is not None]
    return DataProto.concat(known) if known else None
