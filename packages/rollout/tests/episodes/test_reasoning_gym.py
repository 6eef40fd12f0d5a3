"""Problems and scores of reasoning-gym."""

import asyncio
from dataclasses import replace

import pytest
from tidemill_rollout import Problem
from tidemill_rollout.episodes import single_turn

rg = pytest.importorskip("tidemill_rollout.episodes.reasoning_gym", exc_type=ImportError)
TASKS = ["leg_counting", "basic_arithmetic", "countdown", "spell_backward", "number_sorting", "maze", "syllogism"]


@pytest.mark.parametrize("task", TASKS)
def test_problems_depend_on_seed_and_ordinal_alone_and_their_own_answer_scores_1(task):
    problems = rg.ReasoningGymProblems(task, size=4, seed=3)
    again = rg.ReasoningGymProblems(task, size=100, seed=3)
    assert [again[ordinal] for ordinal in (3, 0)] == [problems[3], problems[0]]
    assert problems[0].prompt != rg.ReasoningGymProblems(task, size=4, seed=4)[0].prompt
    for problem in problems:
        arguments = problem.ground_truth, problem.extra_info
        assert rg.reasoning_gym_reward(task, f"So <answer>{problem.ground_truth}</answer>", *arguments) == 1.0
        assert rg.reasoning_gym_reward(task, f"{problem.ground_truth}\n", *arguments) == 1.0
        assert rg.reasoning_gym_reward(task, "<answer>no idea</answer>", *arguments) < 0.5


def test_problem_has_the_system_prompt_and_the_configuration_of_the_task():
    problems = rg.ReasoningGymProblems(
        "leg_counting", size=2, seed=0, system_prompt="Be brief.", min_animals=2, max_animals=2
    )
    problem = problems[1]
    assert problem.prompt[0] == {"role": "system", "content": "Be brief."}
    assert problem.extra_info["metadata"]["num_animals"] == 2
    assert (problem.ordinal, problem.id, problem.data_source) == (1, "leg_counting-1", "leg_counting")
    assert [p.ordinal for p in problems[:2]] == [0, 1]
    with pytest.raises(IndexError, match="expected an ordinal from 0 to 1, got 2"):
        problems[2]


def test_reward_is_that_of_an_episode(scripted):
    problem: Problem = rg.ReasoningGymProblems("basic_arithmetic", size=1, seed=0)[0]
    problem = replace(problem, prompt="hello")
    result = asyncio.run(
        scripted(f"{problem.ground_truth}<|im_end|>").run(single_turn(rg.reasoning_gym_reward), problem)
    )
    assert (result.outcome.status, result.outcome.reward) == ("ok", 1.0)
