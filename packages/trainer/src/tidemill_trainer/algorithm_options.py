"""The options of the functions that make an algorithm: their keyword-only parameters."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints

from pydantic import Field, FiniteFloat
from tidemill_algorithms import ADV_ESTIMATORS, POLICY_LOSSES, rollout_correction

from tidemill_trainer.config_types import Fraction, NotNegative, Positive

_RANGES: Mapping[str, Any] = {
    "clip_ratio_low": Fraction,
    "clip_ratio_high": NotNegative,
    "clip_ratio_c": Annotated[float, Field(gt=1)],
    "gamma": Fraction,
    "lam": Fraction,
    "lam_critic": Fraction,
    "lam_alpha": Positive,
    "tau_pos": Annotated[FiniteFloat, Field(gt=0)],
    "tau_neg": Annotated[FiniteFloat, Field(gt=0)],
    "divergence_low": NotNegative,
    "divergence_high": NotNegative,
    "ratio_cap": Annotated[float, Field(gt=1)],
    "geo_mean.clip_ratio_low": Annotated[float, Field(ge=0, lt=1)],
}
"""Types with a range by option, in place of the annotations of tidemill-algorithms; "function.option": of one function.
"""

FUNCTIONS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "adv_estimator": ADV_ESTIMATORS,
    "policy_loss": POLICY_LOSSES,
}
"""The functions of tidemill-algorithms by name, by the config key that selects one."""

CORRECTION: Callable[..., Any] = rollout_correction
"""The function that is called if the configuration has one of its options."""


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a function's options by name, with the ranges of those of tidemill-algorithms.

    Other annotations are not evaluated: they may have names that only type checkers import.

    Raises:
        ValueError: the function has no signature, such as one of an extension module.
        Exception: what the annotation of an option raises, such as a NameError.
    """
    annotations = {
        each.name: Any if each.annotation is each.empty else each.annotation
        for each in inspect.signature(function).parameters.values()
        if each.kind is each.KEYWORD_ONLY
    }
    code = _code_of(function)
    names = code.__globals__ if inspect.isfunction(code) else {}
    types = get_type_hints(SimpleNamespace(__annotations__=annotations), names, include_extras=True)
    if str(names.get("__name__")).startswith("tidemill_algorithms."):
        own = f"{code.__name__}."
        types = {name: _RANGES.get(own + name, _RANGES.get(name, kind)) for name, kind in types.items()}
    return types


def as_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the signature and the columns (`reads`) of a `functools.partial` or a callable object."""
    if inspect.isroutine(function):
        return function

    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    for source in (_code_of(function), function):  # `reads` may have declared the columns of either
        update_wrapper(call, source)
    return call


def _code_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that runs for a wrapper, a bound method, a `functools.partial` or a callable object."""
    function = inspect.unwrap(function)
    while isinstance(function, partial):
        function = inspect.unwrap(function.func)
    if inspect.ismethod(function):
        return function.__func__
    return function if inspect.isroutine(function) else type(function).__call__


def option_names() -> list[str]:
    """Return the names of all options of tidemill-algorithms, in alphabetical order."""
    functions = [CORRECTION, *(function for group in FUNCTIONS.values() for function in group.values())]
    return sorted({name for function in functions for name in options_of(function)})


def users_of(option: str) -> list[str]:
    """Describe which functions of tidemill-algorithms have an option, such as 'policy_loss="vanilla"'."""
    users = {
        key: [f'"{name}"' for name, function in group.items() if option in options_of(function)]
        for key, group in FUNCTIONS.items()
    }
    return [f"{key} {' or '.join(names)}" for key, names in users.items() if names]
