"""An exception that is kept until all ranks agree on it."""

from types import TracebackType


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
