"""Attributes of modules and classes that are replaced while somebody needs it, and put back afterwards."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Changes:
    """Replaces attributes and remembers what was there."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: object) -> None:
        if name in vars(owner):
            before = vars(owner)[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


class Redirection:
    """Changes that hold while at least one context is open, for the whole process, as modules are the process's.

    Args:
        make: makes them.
    """

    def __init__(self, make: Callable[[Changes], None]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._changes = Changes()
        self._num_open = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """A context in which the changes hold; contexts may overlap."""
        with self._lock:
            if self._num_open == 0:
                try:
                    self._make(self._changes)
                except BaseException:
                    self._changes.undo()
                    raise
            self._num_open += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                if self._num_open == 0:
                    self._changes.undo()
