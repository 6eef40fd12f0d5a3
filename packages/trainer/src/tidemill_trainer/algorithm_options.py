"""The options of the functions that make an algorithm: their keyword-only parameters."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import Field
from tidemill_algorithms import ADV_ESTIMATORS, POLICY_LOSSES, rollout_correction

from tidemill_trainer.config_types import Fraction, NotNegative

_RANGES: Mapping[str, Any] = {  # types with a range, in place of the annotations of tidemill-algorithms
    "clip_ratio_low": Fraction,
    "clip_ratio_high": NotNegative,
    "clip_ratio_c": Annotated[float, Field(gt=1)],
    "gamma": Fraction,
    "lam": Fraction,
}

FUNCTIONS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "adv_estimator": ADV_ESTIMATORS,
    "policy_loss": POLICY_LOSSES,
}
"""The functions of tidemill-algorithms by name, by the config key that selects one."""

CORRECTION: Callable[..., Any] = rollout_correction
"""The function that is called if the configuration has one of its options."""


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a function's options by name, with the ranges of those of tidemill-algorithms."""
    types = get_type_hints(function, include_extras=True)
    if function.__module__.startswith("tidemill_algorithms."):
        types |= _RANGES
    parameters = inspect.signature(function).parameters.values()
    return {each.name: types.get(each.name, Any) for each in parameters if each.kind is each.KEYWORD_ONLY}


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
