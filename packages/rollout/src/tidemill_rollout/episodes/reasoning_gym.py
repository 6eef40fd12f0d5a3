"""Problems and scores of the package reasoning-gym: more than a hundred generated tasks with exact scorers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

from tidemill_rollout.messages import Message
from tidemill_rollout.problem import Problem

try:
    import reasoning_gym
    from reasoning_gym.utils import extract_answer
except ImportError as error:
    raise ImportError(f"reasoning_gym is missing ({error}); pip install 'tidemill-rollout[reasoning-gym]'") from error


class ReasoningGymProblems(Sequence[Problem]):
    """The problems of a task; each is a function of seed and ordinal.

    Args:
        task: name of the task, such as "leg_counting".
        size: number of problems.
        seed: seed of the problems.
        system_prompt: first message of each conversation; it should ask for `<answer>...</answer>`, or for nothing but
            the answer. None: no system message.
        options: configuration of the task, such as its difficulty.
    """

    def __init__(self, task: str, *, size: int, seed: int, system_prompt: str | None = None, **options: Any) -> None:
        self._task = task
        self._system: list[Message] = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self._entries: Any = reasoning_gym.create_dataset(task, size=size, seed=seed, **options)

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[ordinal] for ordinal in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"expected an ordinal from 0 to {len(self) - 1}, got {index}")
        entry = self._entries[index]
        return Problem(
            prompt=[*self._system, {"role": "user", "content": entry["question"]}],
            ordinal=index,
            id=f"{self._task}-{index}",
            data_source=self._task,
            ground_truth=entry["answer"],
            extra_info=entry,
        )


def reasoning_gym_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Score a reply with the task's own scorer: the text in the last `<answer>...</answer>`, else the whole reply."""
    answer = extract_answer(solution_str)
    return float(_scorer(data_source)(solution_str.strip() if answer is None else answer, extra_info))


@functools.cache
def _scorer(task: str) -> Callable[[str, Any], float]:
    return reasoning_gym.get_score_answer_fn(task)  # type: ignore[return-value]  # it creates a data set each time
