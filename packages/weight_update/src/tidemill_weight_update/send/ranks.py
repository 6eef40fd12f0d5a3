"""Agreement between the trainer's ranks, so that an error on one of them is an error on all."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions
from torch.distributed.distributed_c10d import (
    PrefixStore,
    ProcessGroupGloo,
    _get_default_group,
    _get_default_store,
)

_SHORT = 4096
"""Bytes that are sent at once, their number included."""

_HOST = "cpu"
"""What is exchanged lies there, whatever the trainer's `torch.set_default_device`."""


class RankLostError(RuntimeError):
    """A rank of the trainer has ended, or did not answer in time. Its `WeightUpdater` is of no further use."""


class Ranks:
    """The ranks that call `update` together: those of `process_group`, or this process alone.

    They talk over a gloo group of their own, made here, which all of them do together. So there is a limit to each wait
    whatever the backend of `process_group`, and after a wait that was too long that group can still be used. A wait for
    which nothing else is said is as long as its timeout. Without torch.distributed, or in a group of one, nothing is
    communicated. `rank` is the rank in the group, `owner` the global rank of the group's rank 0.

    Raises:
        ValueError: this process is not a member.
        RankLostError: another rank came, and did not connect.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(process_group) if distributed else 0
        self.size = dist.get_world_size(process_group) if distributed else 1
        if self.rank < 0:
            raise ValueError("this process is not a member of process_group; only its members may update weights")
        self.owner = dist.get_process_group_ranks(process_group)[0] if distributed else 0
        self._group = _own_group(process_group) if self.size > 1 else None

    def close(self) -> None:
        """Leaves the group; the others need not."""
        self._group = None

    def exchange(
        self, error: Exception | None, numbers: Sequence[int], timeout_s: float | None = None
    ) -> list[list[int]]:
        """Gives the numbers of all ranks to all ranks, or raises on every rank.

        Args:
            error: what went wrong on this rank.
            numbers: signed 64-bit, as many on each rank.
            timeout_s: longest wait for another rank.

        Raises:
            Exception: `error` itself, on its rank, with a note that names it.
            RuntimeError: on the other ranks, naming the failed ranks and their errors.
            RankLostError: a rank does not answer.
        """
        if self._group is None:
            if error is not None:
                raise error
            return [list(numbers)]
        try:
            gathered = self._gather([error is not None, *numbers], timeout_s)
        except RankLostError as lost:
            if error is not None:
                lost.add_note(f"this rank had failed before: {type(error).__name__}: {error}")
            raise
        failed = [rank for rank, row in enumerate(gathered) if row[0]]
        if not failed:
            return [row[1:] for row in gathered]
        messages = self.gather_texts("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            error.add_note(f"raised on rank {self.rank} of {self.size} of this weight update")
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
            messages = self.gather_texts(description)
            told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(messages))
            raise RuntimeError(f"the ranks disagree about this update; all must pass the same. {told}")

    def from_first(self, text: str) -> str:
        """The text of rank 0, on all ranks; in one message if it is short."""
        if self._group is None:
            return text
        data = text.encode()
        head = torch.zeros(_SHORT, dtype=torch.uint8, device=_HOST)
        if self.rank == 0:
            start = len(data).to_bytes(8, "little") + data[: _SHORT - 8]
            head[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        received = self._broadcast(head)
        size = int.from_bytes(received[:8], "little")
        if size <= _SHORT - 8:
            return received[8 : 8 + size].decode()
        tail = torch.zeros(size, dtype=torch.uint8, device=_HOST)
        if self.rank == 0:
            tail[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self._broadcast(tail).decode()

    def _broadcast(self, data: torch.Tensor) -> bytes:
        assert self._group is not None
        options = BroadcastOptions()
        options.rootRank = 0
        with _as_lost():
            self._group.broadcast([data], options).wait()  # type: ignore[attr-defined]
        return data.numpy().tobytes()

    def _gather(self, numbers: Sequence[int], timeout_s: float | None = None) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64, device=_HOST)
        gathered = torch.empty(self.size, len(numbers), dtype=torch.int64, device=_HOST)
        self._all_gather(list(gathered.unbind()), mine, timeout_s)
        return gathered.tolist()

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks, on all ranks."""
        data = text.encode()
        sizes = [row[0] for row in self._gather([len(data)])]
        mine = torch.zeros(max(*sizes, 1), dtype=torch.uint8, device=_HOST)
        mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device=_HOST)
        gathered = [torch.empty_like(mine) for _ in sizes]
        self._all_gather(gathered, mine, None)
        texts = [bytes(item[:size].tolist()) for item, size in zip(gathered, sizes, strict=True)]
        return [item.decode(errors="replace") for item in texts]

    def _all_gather(self, gathered: list[torch.Tensor], mine: torch.Tensor, timeout_s: float | None) -> None:
        assert self._group is not None
        options = AllgatherOptions()
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        with _as_lost():
            self._group.allgather([gathered], [mine], options).wait()  # type: ignore[attr-defined]


def _own_group(process_group: dist.ProcessGroup | None) -> ProcessGroupGloo:
    """A gloo group of the ranks of `process_group`, with its timeout. It ends with the object."""
    group = _get_default_group() if process_group is None else process_group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # Not `new_group`: all processes of the job would have to call it, or no two groups of the same ranks may follow
    # each other. The number that tells this group's keys from those of others is known when all ranks have come.
    on_cuda = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    numbers = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(numbers, torch.full_like(numbers[0], secrets.randbits(62)), group=group)
    store = PrefixStore(f"tidemill weight update {int(numbers[0]):x}", _get_default_store())
    timeout = max(group._get_backend(device).options._timeout for device in group._device_types)
    with _as_lost():
        return ProcessGroupGloo(store, rank, size, timeout)


@contextmanager
def _as_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"a trainer rank does not answer: {error}") from error
