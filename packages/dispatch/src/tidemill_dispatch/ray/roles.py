"""Worker classes of a group with the arguments of their constructors, one class for each role."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidemill_dispatch.worker import Worker

ONLY_ROLE = ""
"""Role name in a group with one worker class."""


class RayClassWithInitArgs:
    """A worker class and the arguments of its constructor, which are the same on all ranks.

    `cls` is the plain class, without `ray.remote`. The arguments are pickled once per group.

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
    """Worker classes by role; each process of a group constructs one worker of each."""

    roles: Mapping[str, RayClassWithInitArgs]


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> ColocatedClasses:
    """Combine worker classes so that each process of a group runs one worker of each role.

    The workers are constructed in the given order. They share the process, its device and its main thread. They share
    no state: meshes and attributes belong to each worker. `RayWorkerGroup.spawn` returns a group for each role.

    Raises:
        ValueError: no roles, a role with an empty name, or two methods with one name on actor handles (`role_method`).
        TypeError: a value is not a `RayClassWithInitArgs`.
    """
    if not class_dict or "" in class_dict:
        raise ValueError(f"class_dict must map one or more role names to classes, got the names {sorted(class_dict)}")
    for role, init in class_dict.items():
        if not isinstance(init, RayClassWithInitArgs):
            raise TypeError(
                f"role {role!r} must be a RayClassWithInitArgs, got {type(init).__name__}; write "
                "RayClassWithInitArgs(cls, ...)"
            )
    direct_methods(class_dict)
    return ColocatedClasses(dict(class_dict))


def roles_of(init: RayClassWithInitArgs | ColocatedClasses) -> dict[str, RayClassWithInitArgs]:
    """Return the classes of a group by role; raise TypeError for anything else than these two types."""
    if isinstance(init, ColocatedClasses):
        return dict(init.roles)
    if not isinstance(init, RayClassWithInitArgs):
        raise TypeError(
            f"ray_cls_with_init must be RayClassWithInitArgs(cls, ...) or create_colocated_worker_cls({{...}}), "
            f"got {init!r}"
        )
    return {ONLY_ROLE: init}


def public_methods(cls: type[Worker]) -> dict[str, Any]:
    """Return the functions of the user's classes (not of Worker) by name, for direct calls on an actor handle."""
    bases = [base for base in cls.__mro__ if base not in Worker.__mro__]
    found = {name: value for base in reversed(bases) for name, value in vars(base).items()}
    return {name: value for name, value in found.items() if inspect.isfunction(value) and not name.startswith("_")}


def direct_methods(roles: Mapping[str, RayClassWithInitArgs]) -> dict[str, tuple[str, str]]:
    """Return the role and the method for each name that actor handles of a group have for direct calls.

    The name is that of the method, or `role_method` in a group of several roles.

    Raises:
        ValueError: methods of two roles have one name.
    """
    found: dict[str, tuple[str, str]] = {}
    for role, init in roles.items():
        for method in public_methods(init.cls):
            name = method if role == ONLY_ROLE else f"{role}_{method}"
            if name in found:
                (first_role, first_method) = found[name]
                raise ValueError(
                    f"{first_method!r} of role {first_role!r} and {method!r} of role {role!r} are both {name!r} on an "
                    "actor handle; rename a role or a method"
                )
            found[name] = role, method
    return found
