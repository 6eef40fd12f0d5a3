"""Reward functions: found by name, called once per response, with errors counted and reported."""

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from tidemill_dataproto import DataProto
from transformers import PreTrainedTokenizerBase

from tidemill_trainer.config import RewardConfig
from tidemill_trainer.deadline import DeadlineError, deadline

RewardFn = Callable[[str, str, Any, Any], float | dict[str, Any]]
"""`f(data_source, solution_str, ground_truth, extra_info)` returns the score, or a dict with "score" and optionally
"acc"."""

_functions: dict[str, RewardFn] = {}
_MAX_SCORE = float(np.finfo(np.float32).max)


class RewardError(RuntimeError):
    """The reward function cannot be loaded, or it failed on the whole first batch, or on one sample while
    `reward.on_error` is "stop"."""


def register_reward(name: str) -> Callable[[RewardFn], RewardFn]:
    """Register the decorated function for `reward.function = name`.

    Raises:
        ValueError: the name is registered already.
    """

    def decorate(fn: RewardFn) -> RewardFn:
        if name in _functions:
            raise ValueError(f"the reward function {name!r} is registered already; choose another name")
        _functions[name] = fn
        return fn

    return decorate


@register_reward("exact_match")
def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Return 1.0 if the response equals the ground truth, apart from surrounding whitespace; else 0.0."""
    return float(solution_str.strip() == str(ground_truth).strip())


def load_reward(function: str) -> RewardFn:
    """Load a reward function by registered name, "pkg.mod:attr" or "path/file.py:attr".

    Raises:
        RewardError: the function does not exist or cannot be imported; the message names file and function.
    """
    if function in _functions:
        return _functions[function]
    target, colon, attr = function.rpartition(":")
    if not colon:
        raise RewardError(
            f"config key reward.function: expected one of {', '.join(sorted(_functions))}, or "
            f'"pkg.mod:attr" or "path/file.py:attr", got {function!r}'
        )
    if target.endswith(".py") and not Path(target).is_file():
        raise RewardError(
            f"config key reward.function: the file {Path(target).absolute()} does not exist; check the path in "
            f"{function!r}"
        )
    try:
        module = _import_file(Path(target)) if target.endswith(".py") else importlib.import_module(target)
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"config key reward.function: cannot import {function!r}: {type(error).__name__}: {error}"
        ) from error
    fn: Any = getattr(module, attr, None)
    if not callable(fn):
        raise RewardError(
            f"config key reward.function: {target} has no function {attr!r}; define it, or correct the name after the "
            "colon"
        )
    return cast(RewardFn, fn)


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tidemill_reward_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the dataclass decorator looks its module up
    spec.loader.exec_module(module)
    return module


@dataclass(kw_only=True, slots=True)
class Scores:
    """The scores of a batch of B responses.

    Attributes:
        score: float32 [B], the reward that is trained on.
        acc: float32 [B], the accuracy for validation; equal to the score if the function returns no accuracy.
        texts: responses as text.
        errors: one line per sample whose reward function raised or timed out; its score and accuracy are 0.
    """

    score: torch.Tensor
    acc: torch.Tensor
    texts: list[str]
    errors: list[str] = field(default_factory=list)


class RewardScorer:
    """Score responses with a reward function.

    Args:
        config: handling of errors and timeouts.
        fn: the function returned by `load_reward(config.function)`.
        tokenizer: tokenizer that decodes the responses.
    """

    def __init__(self, config: RewardConfig, fn: RewardFn, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config
        self._fn = fn
        self._tokenizer = tokenizer
        self._has_worked = False

    def __call__(self, batch: DataProto) -> Scores:
        """Score each row of `batch` (ragged `responses`; `data_source`, `ground_truth`, `extra_info`).

        Raises:
            RewardError: the function raised, timed out or returned no finite float32, and either
                `reward.on_error` is "stop" or the function has failed on every row so far.
            RuntimeError: there is a deadline, and this is not the main thread.
        """
        with deadline(self._config.timeout_s):
            pass  # raises here in another thread, where it would else count as an error of each response
        texts = self._tokenizer.batch_decode(
            [row.tolist() for row in batch["responses"].unbind()], skip_special_tokens=True
        )
        score, acc = np.zeros(len(batch), np.float32), np.zeros(len(batch), np.float32)
        errors: list[str] = []
        for row, text in enumerate(texts):
            args = [batch.non_tensor_batch[name][row] for name in ("data_source", "ground_truth", "extra_info")]
            try:
                with deadline(self._config.timeout_s):
                    result = self._fn(args[0], text, args[1], args[2])
                score[row], acc[row] = _parse(result)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # including SystemExit, because user code may call exit()
                line = (
                    f"reward function {self._config.function} failed for response {text[:80]!r} (ground truth "
                    f"{args[1]!r}) at {_place(error)}: {type(error).__name__}: {error}"
                )
                if self._config.on_error == "stop":
                    raise RewardError(
                        f'{line}; set reward.on_error="zero" to count such errors and continue'
                    ) from error
                errors.append(line)
        self._has_worked |= len(errors) < len(texts)
        if errors and not self._has_worked:  # else the run would continue without learning anything
            raise RewardError(
                f"the reward function failed for all {len(texts)} responses of the first batch; first error: "
                f"{errors[0]}"
            )
        return Scores(score=torch.from_numpy(score), acc=torch.from_numpy(acc), texts=texts, errors=errors)


def _place(error: BaseException) -> str:
    """Return file and line of the code that raised, or that the deadline interrupted."""
    deadline_files = {inspect.getfile(DeadlineError), contextlib.__file__}
    last = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in deadline_files][-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def _parse(result: Any) -> tuple[float, float]:
    """Return score and accuracy from the result of a reward function."""
    values = result if isinstance(result, dict) else {"score": result}
    if "score" not in values:
        raise ValueError(f'the function must return a number or a dict with "score", got {result!r}')
    score = float(values["score"])
    acc = float(values.get("acc", score))
    if not (abs(score) <= _MAX_SCORE and abs(acc) <= _MAX_SCORE):  # also False for NaN
        raise ValueError(f"the function must return finite numbers within float32, got {result!r}")
    return score, acc
