"""Agreement between the trainer ranks: an error on one of them is raised on all."""

import hashlib
import json
import secrets
import socket
import threading
from collections.abc import Collection, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, _get_default_group, _get_default_store

from tidemill_weight_update.control.board import own_process, process_state


class Failure:
    """Keeps the first exception raised in its `with` blocks. Other `BaseException`s (an interrupt) propagate."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if self.error is None:
            self.error = error
        return True


_SHORT = 1024
"""Bytes of texts that are exchanged with their sizes; longer ones take a second round. All rows have this length: gloo
ends a process that receives a longer row.
"""

_STORE_TIMEOUT_S = 2.0
"""Longest wait for the store while an error is described."""


class RankLostError(RuntimeError):
    """A trainer rank has exited, or did not respond in time. Its `WeightUpdater` cannot be used any more."""


class Ranks:
    """The ranks that call `update` together: those of `process_group`, or this process alone.

    They communicate over their own gloo group, which all of them create together here. So every wait has a timeout
    whatever the backend of `process_group`, and `process_group` itself can still be used after a timeout. The default
    timeout is that of `process_group`. Without torch.distributed, or in a group of one, nothing is communicated. `rank`
    is the rank in the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(process_group) if distributed else 0
        self.size = dist.get_world_size(process_group) if distributed else 1
        if self.rank < 0:
            raise ValueError("this process is not a member of process_group; only its members may update weights")
        self._group: ProcessGroupGloo | None = None
        self._arrivals: _Arrivals | None = None
        self._lost = ""  # message of the first `RankLostError`
        if self.size > 1:
            store, timeout = _own_store(process_group)
            self._arrivals = _Arrivals(store, self.rank, self.size)  # before ranks can wait for each other
            try:
                self._group = ProcessGroupGloo(store, self.rank, self.size, timeout)
            except RuntimeError as error:
                raise self._lost_error(error, "it did not connect to this rank") from error

    def close(self) -> None:
        """Leave the group; other ranks do not have to."""
        self._group = self._arrivals = None

    def exchange(
        self, error: Exception | None, values: Sequence[Any], timeout_s: float | None = None, *, call: str = ""
    ) -> list[list[Any]]:
        """Return the values of all ranks on all ranks, or raise on every rank.

        Args:
            values: what JSON can contain.
            call: the user's call that this exchange begins, with its arguments that must be equal on all ranks.

        Raises:
            Exception: `error` itself, on its rank, with a note that names the rank.
            RuntimeError: on the other ranks, with the failed ranks and their errors.
            ValueError: the ranks have made different calls.
            RankLostError: a rank does not respond.
        """
        if self._group is None:
            if error is not None:
                raise error
            return [list(values)]
        own_failure = "" if error is None else f"{type(error).__name__}: {error}"
        try:
            texts = self.gather_texts(json.dumps([own_failure, call, values]), timeout_s)
        except RankLostError as lost:
            if error is not None:
                lost.add_note(f"this rank had failed before: {own_failure}")
            raise
        if error is not None:
            error.add_note(f"raised on rank {self.rank} of {self.size} of this weight update")
            raise error
        failures, calls, gathered = zip(*map(json.loads, texts), strict=True)
        if any(failures):
            failed = (f"rank {rank} of {self.size}: {failure}" for rank, failure in enumerate(failures) if failure)
            raise RuntimeError(f"weight update failed on {'; '.join(failed)}")
        if len(set(calls)) > 1:
            made = ", ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
            raise ValueError(
                f"the ranks have made different calls ({made}); all ranks must call the methods of WeightUpdater and "
                f"Transfer together, in the same order and with the same arguments"
            )
        return list(gathered)

    def _gather(self, data: bytes, timeout_s: float | None) -> list[bytes]:
        """Return the data of all ranks, of equal length, on all ranks."""
        assert self._group is not None
        assert self._arrivals is not None
        if self._lost:
            raise RankLostError(self._lost)
        options = AllgatherOptions()
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = torch.empty(self.size, len(data), dtype=torch.uint8, device="cpu")  # whatever the default device
        try:
            work = self._group.allgather([list(gathered.unbind())], [mine], options)  # type: ignore[attr-defined]
            self._arrivals.arrive()
            work.wait()
        except RuntimeError as error:
            raise self._lost_error(error, self._arrivals.missing()) from error
        return [row.numpy().tobytes() for row in gathered]

    def _lost_error(self, error: RuntimeError, which: str) -> RankLostError:
        reason = str(error).splitlines()[0].split("] ", 1)[-1]  # without gloo's source location
        self._lost = (
            f"a trainer rank does not respond ({reason}): {which}; see the logs of the other ranks, close this "
            f"WeightUpdater, and create another one on the remaining ranks"
        )
        return RankLostError(self._lost)

    def gather_texts(self, text: str, timeout_s: float | None = None) -> list[str]:
        """Return the texts of all ranks on all ranks. Requires a group of more than one rank."""
        data = text.encode()
        rows = self._gather(len(data).to_bytes(8) + data[:_SHORT].ljust(_SHORT, b"\0"), timeout_s)
        sizes, texts = [int.from_bytes(row[:8]) for row in rows], [row[8:] for row in rows]
        if max(sizes) > _SHORT:
            rest = self._gather(data[_SHORT:].ljust(max(sizes) - _SHORT, b"\0"), timeout_s)
            texts = [text + more for text, more in zip(texts, rest, strict=True)]
        return [text[:size].decode(errors="replace") for text, size in zip(texts, sizes, strict=True)]


class _Arrivals:
    """How many exchanges each rank has begun, in a store: after a failed one it says which ranks are late.

    It is only used for the text of an error; whether an exchange has failed is decided by gloo alone.
    """

    def __init__(self, store: PrefixStore, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._count = 0
        self._is_readable = True
        store.set(f"process {rank}", json.dumps([socket.gethostname(), *own_process()]))
        store.set(f"exchanges {rank}", "0")

    def arrive(self) -> None:
        """Record that this rank has begun an exchange. A store over TCP is written without waiting for it."""
        self._count += 1
        if self._is_readable:
            try:
                self._store.set(f"exchanges {self._rank}", str(self._count))
            except RuntimeError:  # its process has exited, which need not be one of these ranks: `missing` says so
                self._is_readable = False

    def missing(self) -> str:
        """Return which ranks have not begun the exchange of this rank, or else have exited or are stopped."""
        found: list[str] = []
        # The process that serves the store may be the one that does not respond, and reading has no timeout then.
        if self._is_readable:
            reader = threading.Thread(target=lambda: found.append(self._read()), daemon=True)
            reader.start()
            reader.join(_STORE_TIMEOUT_S)
        if not found:
            return "which one is unknown: the store of torch.distributed, usually in global rank 0, does not respond"
        return found[0]

    def _read(self) -> str:
        late, ended = [], []
        for rank in range(self._size):
            try:
                host, pid, location = json.loads(self._store.get(f"process {rank}"))
                count = int(self._store.get(f"exchanges {rank}"))
            except RuntimeError as error:
                return f"which one is unknown: the store of torch.distributed failed: {str(error).splitlines()[0]}"
            name, state = f"rank {rank} of {self._size} (process {pid} on {host})", process_state(pid, location)
            if count < self._count:
                late.append(f"{name} {state or 'did not call the method that this rank has called, or hung in it'}")
            elif state:
                ended.append(f"{name} {state}")
        return "; ".join(late or ended) or "all ranks had begun, this one perhaps too late"


def _own_store(process_group: dist.ProcessGroup | None) -> tuple[PrefixStore, timedelta]:
    """Return a store that no other group of these ranks uses, and the timeout of `process_group`."""
    group = _get_default_group() if process_group is None else process_group
    # Not `new_group`: all processes of the job would have to call it, or the same ranks could not create a second
    # group. The random number of rank 0 separates the keys of this group from those of others.
    has_cpu = torch.device("cpu") in group._device_types  # NCCL alone has not
    device = torch.device("cpu") if has_cpu else torch.device("cuda", torch.cuda.current_device())
    numbers = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(numbers, torch.full_like(numbers[0], secrets.randbits(62)), group=group)
    # A clone has a connection of its own, which a thread of the trainer that waits for a key does not block.
    default: Any = _get_default_store()
    store = PrefixStore(f"tidemill weight update {int(numbers[0]):x}", default.clone())
    return store, max(group._get_backend(device).options._timeout for device in group._device_types)


def names_digest(names: Collection[str]) -> int:
    """Return a signed 64-bit hash of a set of names; 0 if there are none."""
    return text_digest(json.dumps(sorted(names))) if names else 0


def text_digest(text: str) -> int:
    """Return a signed 64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def check_plain(ranks: Ranks, names: Collection[str], digests: Sequence[int]) -> None:
    """Raise ValueError on every rank if one has a plain tensor that rank 0 does not have. Collective.

    Args:
        names: names of the plain tensors of this rank.
        digests: `names_digest` of each rank.
    """
    if all(other in (0, digests[0]) for other in digests):
        return
    first, *others = [set(of_rank) for (of_rank,) in ranks.exchange(None, [sorted(names)])]
    for rank, of_rank in enumerate(others, start=1):
        if unsent := sorted(of_rank - first):
            raise ValueError(
                f"rank {rank} of {ranks.size} passes {len(unsent)} plain tensors that rank 0 does not have, but only "
                f"rank 0 sends plain tensors: {', '.join(map(repr, unsent[:5]))}; pass tensors that only some ranks "
                f"have as LocalShard(tensor=..., global_shape=..., start=(0, ...))"
            )
