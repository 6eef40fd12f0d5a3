"""The episodes of a batch, grouped by problem."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from tidemill_dataproto import DataProto, ragged

from tidemill_algorithms.rewards import check_rewards
from tidemill_algorithms.trained_rows import count_trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The E episodes of a batch in G groups, one per problem.

    An episode may have several rows, such as the branches of an agent: its reward counts once in its group, and all of
    its rows receive its advantage.

    Attributes:
        rewards: float64 [E], in the order of each episode's first row.
        lengths: int64 [E], trained tokens of all rows of the episode.
        group: int64 [E], number of the episode's group.
        counts: float64 [G], episodes of each group.
        episode: int64 [B], number of each row's episode.
        first: int64 [E], first row of each episode.
        mask: `response_mask` of the batch, ragged [B, j].
    """

    rewards: torch.Tensor
    lengths: torch.Tensor
    group: torch.Tensor
    counts: torch.Tensor
    episode: torch.Tensor
    first: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, batch: DataProto) -> Self:
        """Group the episodes of a batch.

        Args:
            batch: `rewards` float [B], ragged `response_mask` [B, j], numpy column `uid` [B], equal for the rows of one
                problem, and, if episodes have several rows, `episode` int64 [B], equal for the rows of one episode.

        Raises:
            ValueError: rows of one episode have different rewards or problems, or a reward is not a finite number.
        """
        mask, rewards = batch["response_mask"], batch["rewards"].double()
        check_rewards("rewards", rewards)
        _, group = np.unique(np.asarray(batch["uid"], dtype=str), return_inverse=True)
        group = torch.from_numpy(group.reshape(-1).astype(np.int64))
        if "episode" in batch.batch.keys():  # noqa: SIM118
            _, episode = torch.unique(batch["episode"], return_inverse=True)
        else:
            episode = torch.arange(len(batch))
        first = torch.full((int(episode.max()) + 1 if len(batch) else 0,), len(batch)).scatter_reduce(
            0, episode, torch.arange(len(batch)), "amin"
        )
        rewards = _of_episodes("rewards", rewards, first, episode)
        group = _of_episodes("uid", group, first, episode)
        lengths = torch.zeros(len(first), dtype=torch.int64).index_add_(0, episode, count_trained(mask))
        return cls(
            rewards=rewards,
            lengths=lengths,
            group=group,
            counts=torch.bincount(group).double(),
            episode=episode,
            first=first,
            mask=mask,
        )

    def of_episodes(self, name: str, column: torch.Tensor) -> torch.Tensor:
        """Return values of rows [B, ...] as values of episodes [E, ...]. ValueError if rows of an episode differ."""
        return _of_episodes(name, column, self.first, self.episode)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values of episodes [E] over each group, float64 [G]."""
        return torch.zeros_like(self.counts).index_add_(0, self.group, values.double())

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of each group, float64 [G]."""
        return self.sum(values) / self.counts

    def centred(self, values: torch.Tensor) -> torch.Tensor:
        """Subtract the mean of its group from each value [E], float64 [E]; exactly 0 for equal float32 values."""
        return values.double() - self.mean(values)[self.group]

    def std(self, values: torch.Tensor) -> torch.Tensor:
        """Return the unbiased standard deviation of each group, float64 [G]; 0 for a group of one."""
        squares = self.sum(self.centred(values).square())
        return (squares / (self.counts - 1).clamp(min=1)).sqrt()

    def to_tokens(self, advantages: torch.Tensor) -> torch.Tensor:
        """Expand advantages of episodes [E] to the trained tokens of their rows, ragged float32 [B, j]; 0 elsewhere."""
        per_row = advantages.float()[self.episode].numpy()
        per_token = torch.from_numpy(np.repeat(per_row, ragged.lengths(self.mask).numpy()))
        return ragged.like(per_token.masked_fill_(~ragged.values(self.mask).bool(), 0.0), self.mask)


def _of_episodes(name: str, column: torch.Tensor, first: torch.Tensor, episode: torch.Tensor) -> torch.Tensor:
    per_episode = column[first]
    is_wrong = column != per_episode[episode]
    if is_wrong.any():
        row = int(is_wrong.nonzero()[0, 0])
        raise ValueError(
            f"expected equal {name} in all rows of an episode, but row {row} differs from row "
            f"{int(first[episode[row]])}; give different episodes different numbers in the column `episode`"
        )
    return per_episode
