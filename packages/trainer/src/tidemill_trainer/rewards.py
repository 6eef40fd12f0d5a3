"""Reward functions: found by name, called once per response, their errors counted and reported."""

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
"""`f(data_source, solution_str, ground_truth, extra_info)`: the score, or a dict with "score", optionally "acc"."""

_functions: dict[str, RewardFn] = {}
_LARGEST = float(np.finfo(np.float32).max)


class RewardError(RuntimeError):
    """The reward function cannot be found, or it raised on a whole batch at first, or on one sample and
    `reward.on_error` is "stop"."""


def register_reward(name: str) -> Callable[[RewardFn], RewardFn]:
    """Registers the decorated function for `reward.function = name`; refuses a name that is taken."""

    def decorate(fn: RewardFn) -> RewardFn:
        if name in _functions:
            raise ValueError(f"a reward function {name!r} is registered already; choose another name")
        _functions[name] = fn
        return fn

    return decorate


@register_reward("exact_match")
def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """1.0 if the response is the ground truth, apart from white space around it; else 0.0."""
    return float(solution_str.strip() == str(ground_truth).strip())


def load_reward(function: str) -> RewardFn:
    """Finds a reward function by registered name, "pkg.mod:attr" or "path/file.py:attr".

    Raises:
        RewardError: there is none, or importing it failed; the text says where it was looked for.
    """
    if function in _functions:
        return _functions[function]
    target, colon, attr = function.rpartition(":")
    if not colon:
        raise RewardError(
            f"unknown reward function {function!r}; registered: {', '.join(sorted(_functions))}; "
            f'or give "pkg.mod:attr" or "path/file.py:attr"'
        )
    if target.endswith(".py") and not Path(target).is_file():
        raise RewardError(f"reward function {function!r}: there is no file {Path(target).absolute()}")
    try:
        module = _import_file(Path(target)) if target.endswith(".py") else importlib.import_module(target)
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"reward function {function!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    fn: Any = getattr(module, attr, None)
    if not callable(fn):
        raise RewardError(f"reward function {function!r}: {target} has no function {attr!r}")
    return cast(RewardFn, fn)


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tidemill_reward_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@dataclass(kw_only=True, slots=True)
class Scores:
    """What the reward function said of a batch of B responses.

    Attributes:
        score, acc: float32 [B]; `acc` is the score where the function gives none of its own.
        texts: the responses as text.
        errors: one line for each sample whose reward function raised or took too long (score and acc are 0 there).
    """

    score: torch.Tensor
    acc: torch.Tensor
    texts: list[str]
    errors: list[str] = field(default_factory=list)


class RewardScorer:
    """Scores responses with `fn`, which `load_reward(config.function)` found."""

    def __init__(self, config: RewardConfig, fn: RewardFn, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config
        self._fn = fn
        self._tokenizer = tokenizer
        self._has_worked = False

    def __call__(self, batch: DataProto) -> Scores:
        """Scores each row of `batch` (ragged `responses`; `data_source`, `ground_truth`, `extra_info`).

        Raises:
            RewardError: the function raised, took too long or returned no finite float32, and the configuration says to
                stop, or it has done so on every row since it was first called.
            RuntimeError: there is a deadline, and this is not the main thread.
        """
        with deadline(self._config.timeout_s):
            pass  # where there can be none, it is no failure of a response
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
            except BaseException as error:  # code that it runs may call exit(), too
                line = (
                    f"reward function {self._config.function} failed for response {text[:80]!r} (ground truth "
                    f"{args[1]!r}) at {_place(error)}: {type(error).__name__}: {error}"
                )
                if self._config.on_error == "stop":
                    raise RewardError(f'{line}; reward.on_error="zero" would count it and go on') from error
                errors.append(line)
        self._has_worked |= len(errors) < len(texts)
        if errors and not self._has_worked:  # nothing would be learnt, which looks like a run that goes on
            raise RewardError(f"all {len(texts)} rewards of the first batch failed; the first: {errors[0]}")
        return Scores(score=torch.from_numpy(score), acc=torch.from_numpy(acc), texts=texts, errors=errors)


def _place(error: BaseException) -> str:
    """File and line of the code that raised, or that the deadline interrupted."""
    of_deadline = {inspect.getfile(DeadlineError), contextlib.__file__}
    last = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in of_deadline][-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def _parse(result: Any) -> tuple[float, float]:
    """Score and accuracy from what a reward function returned."""
    values = result if isinstance(result, dict) else {"score": result}
    if "score" not in values:
        raise ValueError(f'expected a number or a dict with "score", got {result!r}')
    score = float(values["score"])
    acc = float(values.get("acc", score))
    if not (abs(score) <= _LARGEST and abs(acc) <= _LARGEST):  # not of NaN, either
        raise ValueError(f"expected finite numbers within float32, got {result!r}")
    return score, acc
