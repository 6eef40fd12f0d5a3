"""Attributes of modules and classes that are replaced while a context is open and restored afterwards."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Attributes:
    """Replaces attributes and remembers their previous values."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, value: object) -> None:
        if name in vars(owner):
            before = vars(owner)[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()


class Monkeypatch:
    """A patch that is active while at least one of its contexts is open.

    It holds for the whole process, because modules belong to the process.

    Args:
        apply: replaces the attributes.
    """

    def __init__(self, apply: Callable[[Attributes], None]) -> None:
        self._apply = apply
        self._lock = threading.Lock()
        self._attributes = Attributes()
        self._num_open = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """A context in which the patch is active; contexts may overlap."""
        with self._lock:
            if self._num_open == 0:
                try:
                    self._apply(self._attributes)
                except BaseException:
                    self._attributes.restore()
                    raise
            self._num_open += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                if self._num_open == 0:
                    self._attributes.restore()
