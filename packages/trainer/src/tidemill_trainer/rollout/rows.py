"""From the trajectories of episodes to the rows of a training batch."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_rollout import EpisodeResult

from tidemill_trainer.rollout.episode_task import EpisodeTask
from tidemill_trainer.rollout.routed_experts import COLUMN, routed_experts_column


def training_rows(
    episodes: Sequence[tuple[EpisodeTask, EpisodeResult]], *, experts_shape: tuple[int, int] | None = None
) -> DataProto:
    """Create one row per trajectory, in the order of the episodes.

    Args:
        episodes: R episodes. One without a trajectory has no row; one with branches has several.
        experts_shape: number of layers and experts per token, if the engines return routed experts.

    Returns:
        Ragged columns `prompts`, `responses`, `input_ids` int64, `response_mask` and `rollout_log_probs` float32 with
        the length of `responses` (log-probs are 0 where the mask is 0); int64 `episode` [B], its number;
        object columns `versions`, `turns`, `branch` and `finish_reason` (see `Trajectory`), and `messages`, None unless
        the episode is shown. With `experts_shape`, `routed_experts` int32
        [B, j, layers, top_k] (see `routed_experts_column`).
    """
    owned = [(task, row) for task, result in episodes for row in result.trajectories]
    rows = [row for _, row in owned]
    prompts = _ragged([row.prompt_ids for row in rows], torch.int64)
    responses = _ragged([row.response_ids for row in rows], torch.int64)
    columns = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": ragged.concat_rows(prompts, responses),
        "response_mask": _ragged([row.response_mask for row in rows], torch.float32),
        "rollout_log_probs": _ragged([row.rollout_log_probs for row in rows], torch.float32),
        "episode": torch.tensor([task.number for task, _ in owned], dtype=torch.int64),
    }
    if experts_shape is not None:  # the last request of a row has processed all of its tokens but the last
        encoded = [row.extra[COLUMN] for row in rows]
        num_layers, top_k = experts_shape
        columns[COLUMN] = routed_experts_column(encoded, columns["input_ids"], num_layers=num_layers, top_k=top_k)
    return DataProto.from_dict(
        columns,
        {
            "versions": _objects([tuple(row.versions) for row in rows]),
            "turns": _objects([tuple(row.turns) for row in rows]),
            "branch": _objects([row.branch for row in rows]),
            "finish_reason": _objects([row.finish_reason for row in rows]),
            "messages": _objects([row.messages if task.is_shown else None for task, row in owned]),
        },
    )


def _ragged(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    values = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    return ragged.ragged(values, [len(row) for row in rows])


def _objects(values: Sequence[object]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values  # also where all values are tuples of one length
    return column
