"""Errors that a call to a worker group raises on the driver."""

from typing import Any


class UnknownMethodError(AttributeError, TypeError):
    """The group has no such method. An AttributeError for `hasattr`, and a TypeError like other wrong calls."""


class _CallError(Exception):
    """Is pickled as its text and attributes: by default, unpickling calls the class with the text alone."""

    def __reduce__(self) -> Any:
        return _restored, (type(self), str(self)), vars(self)


def _restored(kind: type[_CallError], text: str) -> _CallError:
    error = kind.__new__(kind)
    error.args = (text,)
    return error


class WorkerError(_CallError, RuntimeError):
    """A worker's method, or its constructor (method "__init__"), raised.

    Attributes:
        group: name of the worker group.
        rank: rank that raised first.
        host: node and process, as "hostname:pid".
        method: name of the method that was called.
        error_type: qualified name of the exception's class on the worker, for example "ValueError".
        error_message: text of the exception.
        remote_traceback: traceback on the worker, formatted.
        other_errors: one line for each other rank that raised.
        still_running: ranks that had not finished the call when this error was raised.
    """

    def __init__(
        self,
        *,
        group: str,
        rank: int,
        host: str,
        method: str,
        error_type: str,
        error_message: str,
        remote_traceback: str,
        other_errors: tuple[str, ...] = (),
        still_running: tuple[int, ...] = (),
    ):
        self.group = group
        self.rank = rank
        self.host = host
        self.method = method
        self.error_type = error_type
        self.error_message = error_message
        self.remote_traceback = remote_traceback
        self.other_errors = other_errors
        self.still_running = still_running
        lines = [
            f"{error_type} on rank {rank} of group {group!r} ({host}) in {method!r}: {error_message}",
            *(f"also: {line}" for line in other_errors),
        ]
        if still_running:
            lines.append(f"ranks {list(still_running)} have not finished this call; shut the group down if they hang")
        lines.append(f"remote traceback of rank {rank}:\n{remote_traceback}".rstrip())
        super().__init__("\n".join(lines))


class WorkerDiedError(_CallError, RuntimeError):
    """A worker's process exited, was killed (for example out of memory), or its node was lost.

    The group refuses calls until its dead ranks are restarted.

    Attributes:
        group, rank, method: as in `WorkerError`.
        host: as in `WorkerError`; "unknown host" for a worker that died while it started.
        reason: Ray's report of the death.
        other_errors: one line for each other rank that raised in the same call.
    """

    def __init__(
        self, *, group: str, rank: int, host: str, method: str, reason: str, other_errors: tuple[str, ...] = ()
    ):
        self.group = group
        self.rank = rank
        self.host = host
        self.method = method
        self.reason = reason
        self.other_errors = other_errors
        lines = [
            f"rank {rank} of group {group!r} ({host}) died during {method!r}: {reason}",
            *(f"also: {line}" for line in other_errors),
            "the group refuses calls until its dead ranks are restarted",
        ]
        super().__init__("\n".join(lines))


class CallTimeoutError(_CallError, TimeoutError):
    """A call did not finish before its timeout. The ranks keep running it: `get` of its future may be called again.

    Attributes:
        group, method: as in `WorkerError`.
        timeout_s: timeout in seconds.
        still_running: ranks that have not finished.
    """

    def __init__(self, *, group: str, method: str, timeout_s: float, still_running: tuple[int, ...]):
        self.group = group
        self.method = method
        self.timeout_s = timeout_s
        self.still_running = still_running
        super().__init__(
            f"{method!r} of group {group!r} did not finish within {timeout_s:g} s: ranks {list(still_running)} are "
            "still running. Raise timeout_s (of the group, @register or get), or shut the group down if they hang."
        )
