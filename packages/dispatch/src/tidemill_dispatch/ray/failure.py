"""An exception of a worker, in the form in which it is sent to the driver."""

import os
import re
import socket
import time
import traceback
from dataclasses import dataclass

from ray.exceptions import RayError, RayTaskError


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An exception of a worker as plain text: exceptions of user code may not support pickling."""

    host: str
    error_type: str
    error_message: str
    remote_traceback: str
    time_s: float

    @classmethod
    def from_exception(cls, error: BaseException) -> "Failure":
        """Return the failure of an exception that was caught in this process."""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        inner = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without the actor's frame
        return cls(
            host=f"{socket.gethostname()}:{os.getpid()}",
            error_type=name,
            error_message=_text(error),
            remote_traceback="".join(traceback.format_exception(kind, error, inner)),
            time_s=time.time(),
        )

    @classmethod
    def from_ray(cls, host: str, error: RayError) -> "Failure":
        """Return the failure of an error that Ray raised outside a worker's method, for example in pickling."""
        cause = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error
        return cls(
            host=host,
            error_type=type(cause).__qualname__,
            error_message=_text(cause),
            remote_traceback=re.sub(r"\x1b\[\d*m", "", str(error)),  # without Ray's terminal colors
            time_s=time.time(),
        )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001 - must not hide the exception itself
        return f"(its __str__ raised {type(second).__name__})"
