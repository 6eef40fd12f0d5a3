"""Small collectives over plain data: the ranks agree on it before they enter a large collective."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, FileNotFoundError, OSError)
}


def all_gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the picklable `value` of every rank of `group`, in rank order. Collective over `group` (gloo).

    Raises:
        RuntimeError: a rank exited or the timeout expired.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} lost another rank, which exited or did not respond within timeout_s of the engine "
            f"configuration; look for the error in the log of that rank: {error}"
        ) from error
    return values


def check_same(value: Any, what: str, group: dist.ProcessGroup) -> None:
    """Check that all ranks have the same `value`. Collective over `group` (gloo).

    Raises:
        ValueError: the values differ; raised on every rank.
    """
    values = all_gather(value, group)
    others = [rank for rank, other in enumerate(values) if other != values[0]]
    if others:
        raise ValueError(f"rank {others[0]} has another {what} than rank 0; use the same on all ranks")


def raise_any_error(error: Exception | None, group: dist.ProcessGroup) -> None:
    """Raise on every rank of `group` if any rank has an error, so that no rank waits for one that failed. Collective.

    The failing rank raises its own error. The others raise an error of the same built-in type (RuntimeError for other
    types) that names the rank.
    """
    raise_first_error(all_gather(describe_error(error), group), error)


def describe_error(error: Exception | None) -> tuple[str, str] | None:
    """Return the type and message of `error`, for `raise_first_error` on other ranks."""
    if error is None:
        return None
    kind = next((name for name, cls in _KINDS.items() if isinstance(error, cls)), None)
    if kind is None and not isinstance(error, RuntimeError):  # the message of a KeyError is unclear without the type
        return "RuntimeError", f"{type(error).__name__}: {error}"
    return kind or "RuntimeError", str(error)


def raise_first_error(described: list[tuple[str, str] | None], own: Exception | None) -> None:
    """Raise `own`, or else the first error that a rank described; return if there is none."""
    if own is not None:
        raise own
    for rank, item in enumerate(described):
        if item is not None:
            kind, message = item
            raise _KINDS.get(kind, RuntimeError)(f"rank {rank}: {message}")


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup) -> Iterator[None]:
    """Run a block on every rank and raise an error of one rank on all of them. Collective over `group`.

    A collective within the block must fail on every rank if it fails on one (as those of torch.distributed.checkpoint
    do), and no code before it may fail on one rank alone: the other ranks would wait in the collective.
    """
    error = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised below, on every rank
        error = caught
    raise_any_error(error, group)
