"""`@register`: makes a worker's method callable on its group."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tidemill_dispatch.mode import Dispatch, DispatchMode

_F = TypeVar("_F", bound=Callable[..., Any])
_ATTRIBUTE = "__tidemill_method__"


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSpec:
    """Registration of a method; see `register` for the fields."""

    name: str
    mode: DispatchMode
    blocking: bool
    timeout_s: float | None


def register(
    dispatch_mode: DispatchMode = Dispatch.ALL_TO_ALL,
    *,
    blocking: bool = True,
    timeout_s: float | None = None,
) -> Callable[[_F], _F]:
    """Make a worker's method callable on the group.

    Args:
        dispatch_mode: `split_over(mesh_name)`, `split_over_ranks()`, a mode of `Dispatch`, or your own `DispatchMode`.
        blocking: True: a call on the group waits and returns the result. False: it returns a future at once.
        timeout_s: timeout of each call in seconds. None uses the group's.

    Returns:
        A decorator that returns the function itself. A subclass that overrides the method keeps its registration. The
        event loop of the process runs an async method to completion before the next call starts.

    Raises:
        TypeError: `dispatch_mode` is not a `DispatchMode` (for example `@register` without parentheses), or the
            decorated function is a generator function.
    """
    if not isinstance(dispatch_mode, DispatchMode):
        raise TypeError(
            f"dispatch_mode must be a DispatchMode, got {dispatch_mode!r}; write for example "
            "@register(Dispatch.ONE_TO_ALL) or @register(split_over('actor')), with parentheses"
        )

    def decorate(fn: _F) -> _F:
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise TypeError(
                f"{fn.__qualname__} is a generator function, which cannot be registered; register a method that "
                "returns its result, for example as a list"
            )
        spec = MethodSpec(name=fn.__name__, mode=dispatch_mode, blocking=blocking, timeout_s=timeout_s)
        setattr(fn, _ATTRIBUTE, spec)
        return fn

    return decorate


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """Return the registered methods of a class and its bases by name. The most derived registration applies.

    The name is that of the attribute: the function has another one if it is an alias, or decorated.
    """
    found: dict[str, MethodSpec] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            spec = getattr(value, "__dict__", {}).get(_ATTRIBUTE)
            if isinstance(spec, MethodSpec):
                found[name] = replace(spec, name=name)
    return found
