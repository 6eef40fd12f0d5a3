"""Small collectives over plain data: what the ranks must agree on before they enter a large one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, FileNotFoundError, OSError)
}


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the picklable `value` of every rank of `group` in rank order. Collective over `group` (gloo).

    Raises:
        RuntimeError: a rank has ended, or did not come in time.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} lost another rank, which has ended, or did not come within the timeout_s of the "
            f"engine's configuration; look for its own error: {error}"
        ) from error
    return values


def check_same(value: Any, what: str, group: dist.ProcessGroup) -> None:
    """Collective over `group` (gloo).

    Raises:
        ValueError: not all ranks have the same `value`; on every rank.
    """
    values = gather(value, group)
    others = [rank for rank, other in enumerate(values) if other != values[0]]
    if others:
        raise ValueError(f"rank {others[0]} has another {what} than rank 0; give all ranks the same")


def raise_together(error: Exception | None, group: dist.ProcessGroup) -> None:
    """Raises on every rank of `group` if any rank brings an error, so that no rank waits for one that has left.

    The failing rank raises its own error; the others raise one of the same built-in kind (RuntimeError for a kind of
    its own) that names the rank. Collective over `group`.
    """
    raise_first(gather(describe(error), group), error)


def describe(error: Exception | None) -> tuple[str, str] | None:
    """The kind and message of `error`, to be sent to the other ranks."""
    if error is None:
        return None
    kind = next((name for name, cls in _KINDS.items() if isinstance(error, cls)), None)
    if kind is None and not isinstance(error, RuntimeError):  # of some errors the message says little without the kind
        return "RuntimeError", f"{type(error).__name__}: {error}"
    return kind or "RuntimeError", str(error)


def raise_first(described: list[tuple[str, str] | None], own: Exception | None) -> None:
    """Raises `own`, or else the first error that a rank described; returns if there is none."""
    if own is not None:
        raise own
    for rank, item in enumerate(described):
        if item is not None:
            kind, message = item
            raise _KINDS.get(kind, RuntimeError)(f"rank {rank}: {message}")


@contextmanager
def together(group: dist.ProcessGroup) -> Iterator[None]:
    """Runs a block on every rank; an error of one is raised on all. Collective over `group`.

    A collective within the block must itself fail on every rank if it fails on one, as those of
    torch.distributed.checkpoint do, and nothing that may fail on one rank alone may come before it: the others would
    wait in it for a rank that has left.
    """
    error = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised below, on every rank
        error = caught
    raise_together(error, group)
