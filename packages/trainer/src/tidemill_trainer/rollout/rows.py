"""From the trajectories of episodes to the rows of a training batch."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_rollout import EpisodeResult


def training_rows(results: Sequence[EpisodeResult]) -> DataProto:
    """Create one row per trajectory, in the order of the episodes.

    Args:
        results: R episodes. One without a trajectory has no row; one with branches has several.

    Returns:
        Ragged columns `prompts`, `responses`, `input_ids` int64, `response_mask` and `rollout_log_probs` float32 with
        the length of `responses` (log-probs are 0 where the mask is 0); float32 `scores` and `acc` [B], equal for the
        rows of an episode; int64 `episode` [B], the position in `results`; object columns `uid` (the problem's id) and
        `versions` (see `Trajectory`).
    """
    rows = [(number, row) for number, result in enumerate(results) for row in result.trajectories]
    prompts = _ragged([row.prompt_ids for _, row in rows], torch.int64)
    responses = _ragged([row.response_ids for _, row in rows], torch.int64)
    owners = [results[number] for number, _ in rows]
    return DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": ragged.concat_rows(prompts, responses),
            "response_mask": _ragged([row.response_mask for _, row in rows], torch.float32),
            "rollout_log_probs": _ragged([row.rollout_log_probs for _, row in rows], torch.float32),
            "scores": torch.tensor([owner.outcome.reward for owner in owners], dtype=torch.float32),
            "acc": torch.tensor(
                [owner.outcome.metrics.get("acc", owner.outcome.reward) for owner in owners], dtype=torch.float32
            ),
            "episode": torch.tensor([number for number, _ in rows], dtype=torch.int64),
        },
        {
            "uid": _objects([owner.problem.id for owner in owners]),
            "versions": _objects([tuple(row.versions) for _, row in rows]),
        },
    )


def _ragged(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    values = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    return ragged.ragged(values, [len(row) for row in rows])


def _objects(values: Sequence[object]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values  # also where all values are tuples of one length
    return column
