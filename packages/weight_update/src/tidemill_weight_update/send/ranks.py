"""Agreement between the trainer's ranks, so that an error on one of them is an error on all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

_SHORT = 4096
"""Bytes that are sent at once, their number included."""


class RankLostError(RuntimeError):
    """A rank of the trainer has ended, or did not answer within its process group's timeout."""


class Ranks:
    """The ranks that call `update` together: those of `process_group`, or this process alone.

    Without torch.distributed, or in a group of one, nothing is communicated. `rank` is the rank in the group, `owner`
    the global rank of the group's rank 0.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self._group = process_group
        self.rank = dist.get_rank(process_group) if distributed else 0
        self.size = dist.get_world_size(process_group) if distributed else 1
        if self.rank < 0:
            raise ValueError("this process is not a member of process_group; only its members may update weights")
        self.owner = dist.get_process_group_ranks(process_group)[0] if distributed else 0
        on_cuda = self.size > 1 and dist.get_backend(process_group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")

    def exchange(self, error: Exception | None, numbers: Sequence[int]) -> list[list[int]]:
        """Gives the numbers of all ranks to all ranks, or raises on every rank.

        Args:
            error: what went wrong on this rank.
            numbers: signed 64-bit, as many on each rank.

        Raises:
            Exception: `error` itself, on its rank.
            RuntimeError: on the other ranks, naming the failed ranks and their errors.
            RankLostError: a rank does not answer.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return [list(numbers)]
        gathered = self._gather([error is not None, *numbers])
        failed = [rank for rank, row in enumerate(gathered) if row[0]]
        if not failed:
            return [row[1:] for row in gathered]
        messages = self._gather_texts("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        told = "; ".join(f"rank {rank} of {self.size}: {messages[rank]}" for rank in failed)
        raise RuntimeError(f"weight update failed on {told}")

    def agree(self, error: Exception | None, digest: int, description: str) -> None:
        """Returns on every rank, or raises on every rank.

        Args:
            error: what went wrong on this rank.
            digest: signed 64-bit; must be equal on all ranks.
            description: what `digest` stands for, shown if it differs.

        Raises:
            Exception: as `exchange` does.
            RuntimeError: digests differ.
        """
        digests = self.exchange(error, [digest])
        if any(row != digests[0] for row in digests):
            messages = self._gather_texts(description)
            told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(messages))
            raise RuntimeError(f"the ranks disagree about this update; all must pass the same. {told}")

    def from_first(self, text: str) -> str:
        """The text of rank 0, on all ranks; in one message if it is short."""
        if self.size == 1:
            return text
        data = text.encode()
        head = torch.zeros(_SHORT, dtype=torch.uint8)
        if self.rank == 0:
            start = len(data).to_bytes(8, "little") + data[: _SHORT - 8]
            head[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        received = self._broadcast(head)
        size = int.from_bytes(received[:8], "little")
        if size <= _SHORT - 8:
            return received[8 : 8 + size].decode()
        tail = torch.zeros(size, dtype=torch.uint8)
        if self.rank == 0:
            tail[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self._broadcast(tail).decode()

    def _broadcast(self, data: torch.Tensor) -> bytes:
        data = data.to(self._device)
        with _as_lost():
            dist.broadcast(data, self.owner, group=self._group)
        return data.cpu().numpy().tobytes()

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        gathered = torch.empty(self.size, len(numbers), dtype=torch.int64, device=self._device)
        with _as_lost():
            dist.all_gather(list(gathered.unbind()), mine, group=self._group)
        return gathered.tolist()

    def _gather_texts(self, text: str) -> list[str]:
        data = text.encode()
        sizes = [row[0] for row in self._gather([len(data)])]
        mine = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        mine = mine.to(self._device)
        gathered = [torch.empty_like(mine) for _ in sizes]
        with _as_lost():
            dist.all_gather(gathered, mine, group=self._group)
        texts = [bytes(item[:size].tolist()) for item, size in zip(gathered, sizes, strict=True)]
        return [item.decode(errors="replace") for item in texts]


@contextmanager
def _as_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"a trainer rank does not answer: {error}") from error
