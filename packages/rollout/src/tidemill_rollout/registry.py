"""Functions of users, found by name."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions of one kind.

    Args:
        kind: what they are, for messages, such as "episode".
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Register the decorated function under a name.

        Raises:
            ValueError: the name is registered already.
        """

        def decorate(function: F) -> F:
            if name in self._functions:
                raise ValueError(f"the {self._kind} {name!r} is registered already; choose another name")
            self._functions[name] = function
            return function

        return decorate

    def load(self, name: str) -> F:
        """Return a function by registered name, "pkg.mod:attr" or "path/file.py:attr".

        Raises:
            ValueError: there is no such function; the message names file and function.
            ImportError: its module cannot be imported.
        """
        if name in self._functions:
            return self._functions[name]
        target, colon, attribute = name.rpartition(":")
        if not colon:
            known = ", ".join(sorted(self._functions)) or "none"
            raise ValueError(
                f'expected a registered {self._kind} ({known}), "pkg.mod:attr" or "path/file.py:attr", got {name!r}'
            )
        if target.endswith(".py") and not Path(target).is_file():
            raise ValueError(f"the file {Path(target).absolute()} does not exist; check the path in {name!r}")
        try:
            module = _import_file(Path(target)) if target.endswith(".py") else importlib.import_module(target)
        except (Exception, SystemExit) as error:
            raise ImportError(
                f"cannot import {target!r} for the {self._kind} {name!r}: {type(error).__name__}: {error}"
            ) from error
        function: Any = getattr(module, attribute, None)
        if not callable(function):
            raise ValueError(f"{target} has no function {attribute!r}; define it, or correct the name after the colon")
        return cast(F, function)


def _import_file(path: Path) -> ModuleType:
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]  # two folders may have a file of one name
    name = f"tidemill_user_{path.stem}_{digest}"
    if name in sys.modules:  # a second import would register its functions again
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # the dataclass decorator looks its module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
