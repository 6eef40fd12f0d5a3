"""The worker classes of a group, and what their constructors get."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidemill_dispatch.worker import Worker

ONLY_ROLE = ""
"""The role of a group that has one."""


class RayClassWithInitArgs:
    """A worker class and the arguments of its constructor, for every rank alike.

    `cls` is the plain class, not the result of `ray.remote(cls)`. The arguments are pickled once per group.

    Raises:
        TypeError: `cls` is not a subclass of `Worker`, or its constructor does not take the arguments.
    """

    def __init__(self, cls: type[Worker], *args: Any, **kwargs: Any):
        if not isinstance(cls, type) or not issubclass(cls, Worker):
            raise TypeError(
                f"expected a subclass of tidemill_dispatch.Worker (the plain class, without ray.remote), got {cls!r}"
            )
        signature = inspect.signature(cls)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}{signature} cannot be called with these arguments: {error}") from None
        self.cls = cls
        self.args = args
        self.kwargs = kwargs


@dataclass(frozen=True, slots=True)
class ColocatedClasses:
    """Several worker classes by role; each process of a group makes one worker of each."""

    roles: Mapping[str, RayClassWithInitArgs]


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> ColocatedClasses:
    """Puts one worker of each role into every process of a group: `group.spawn()` gives a group for each role.

    The workers are constructed in the order given. They share the process, its device and its main thread, and no
    state: meshes and attributes are each worker's own.

    Raises:
        ValueError: no roles, or a role without a name.
        TypeError: a value is not a `RayClassWithInitArgs`.
    """
    if not class_dict or "" in class_dict:
        raise ValueError(f"expected one or more roles with names, got {sorted(class_dict)}")
    for role, init in class_dict.items():
        if not isinstance(init, RayClassWithInitArgs):
            raise TypeError(f"role {role!r} must be a RayClassWithInitArgs, got {type(init).__name__}")
    return ColocatedClasses(dict(class_dict))


def roles_of(init: RayClassWithInitArgs | ColocatedClasses) -> dict[str, RayClassWithInitArgs]:
    """The classes of a group by role."""
    return dict(init.roles) if isinstance(init, ColocatedClasses) else {ONLY_ROLE: init}


def public_methods(cls: type[Worker]) -> dict[str, Any]:
    """Functions of the user's classes (not of Worker) by name, for calls through a bare actor handle."""
    bases = [base for base in cls.__mro__ if base not in Worker.__mro__]
    found = {name: value for base in reversed(bases) for name, value in vars(base).items()}
    return {name: value for name, value in found.items() if inspect.isfunction(value) and not name.startswith("_")}
