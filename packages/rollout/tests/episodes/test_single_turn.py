"""The episode single_turn: prompt forms, the reward function's arguments, results and errors."""

import asyncio
import threading

import pytest
from tidemill_rollout import Problem
from tidemill_rollout.episodes import single_turn
from tidemill_rollout.episodes.tool import Tool

PROBLEM = Problem(prompt="hello", data_source="sums", ground_truth="42", extra_info={"level": 1})


def run(policy, reward, problem=PROBLEM, **settings):
    return asyncio.run(policy.run(single_turn(reward), problem, **settings))


def test_reward_function_receives_the_problem_and_the_reply_without_special_tokens(scripted):
    received = []

    def reward(solution_str, ground_truth, data_source, extra_info):  # in an order of its own
        received.append((data_source, solution_str, ground_truth, extra_info, threading.current_thread()))
        return {"score": 0.5, "acc": 1.0}

    result = run(scripted("the answer<|im_end|>"), reward)
    assert received[0][:4] == ("sums", "the answer", "42", {"level": 1})
    assert received[0][4] is not threading.main_thread()
    assert received[0][4].name == "session-1"
    assert (result.outcome.reward, result.outcome.metrics) == (0.5, {"acc": 1.0})
    assert len(result.trajectories) == 1


def test_async_reward_function_runs_in_the_event_loop(scripted):
    async def reward(data_source, solution_str, ground_truth, extra_info):
        assert threading.current_thread() is threading.main_thread()
        await asyncio.sleep(0)
        return 1.0

    assert run(scripted("x<|im_end|>"), reward).outcome.reward == 1.0


def test_wrapper_that_returns_a_coroutine_is_awaited(scripted):
    async def reward(data_source, solution_str, ground_truth, extra_info):
        return 1.0

    assert run(scripted("x<|im_end|>"), lambda **arguments: reward(**arguments)).outcome.reward == 1.0


def test_text_prompt_has_no_template_and_messages_have_it(scripted, tokenizer):
    policy = scripted("x<|im_end|>")
    run(policy, lambda **_: 1.0)
    run(policy, lambda **_: 1.0, Problem(prompt=[{"role": "user", "content": "hello"}]))
    texts = [tokenizer.decode(prompt) for prompt, _ in policy.engine.requests]
    assert texts == ["hello", "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"]


def test_tools_of_a_problem_are_in_the_prompt_of_messages_and_not_in_that_of_a_text(scripted_tools):
    def weather(city: str) -> str:
        """Return the weather.

        Args:
            city: name of the city
        """
        return city

    tools = [Tool(weather).schema]
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    policy, messages, texts = scripted_tools(f"{call}<|im_end|>"), [{"role": "user", "content": "hello"}], []

    def reward(data_source, solution_str, ground_truth, extra_info):
        texts.append(solution_str)
        return 1.0

    for prompt in (messages, "hello"):
        run(policy, reward, Problem(prompt=prompt, tools=tools))
    run(policy, reward, Problem(prompt=messages))
    received = [prompt for prompt, _ in policy.engine.requests]
    tokenizer = policy.template.tokenizer
    expected = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=True)
    assert received[0] == expected["input_ids"]
    assert '"name": "weather"' in tokenizer.decode(received[0])
    assert tokenizer.decode(received[1]) == "hello"
    assert "weather" not in tokenizer.decode(received[2])
    assert texts == [call] * 3  # calls are not executed


def test_reward_function_that_raises_is_an_environment_error_that_keeps_the_tokens(scripted):
    def reward(data_source, solution_str, ground_truth, extra_info):
        return int(solution_str)

    result = run(scripted("x<|im_end|>"), reward)
    assert result.outcome.status == "environment_error"
    assert result.outcome.reason.startswith("ValueError: invalid literal for int()")
    assert "test_single_turn.py" in result.outcome.reason
    assert len(result.trajectories) == 1


def test_reward_functions_that_never_return_stop_no_other(scripted):
    is_stopped = threading.Event()
    policy = scripted("x<|im_end|>")

    async def many():
        slow = single_turn(lambda **_: is_stopped.wait())
        results = await asyncio.gather(
            *(policy.run(slow, PROBLEM, timeout_s=0.05) for _ in range(50)),
            policy.run(single_turn(lambda **_: 1), PROBLEM),
        )
        is_stopped.set()
        return results

    *slow, other = asyncio.run(many())
    assert {result.outcome.reason for result in slow} == {"time: no result within 0.05 s"}
    assert other.outcome.reward == 1.0


@pytest.mark.parametrize("result", [None, "1", float("nan"), {"acc": 1.0}])
def test_reward_that_is_no_finite_number_is_an_environment_error(scripted, result):
    assert run(scripted("x<|im_end|>"), lambda **_: result).outcome.status == "environment_error"


def test_reward_function_without_result_in_time_is_an_environment_error(scripted):
    is_stopped = threading.Event()
    try:
        episode = single_turn(lambda **_: is_stopped.wait(), reward_timeout_s=0.05)
        outcome = asyncio.run(scripted("4<|im_end|>").run(episode, PROBLEM)).outcome
    finally:
        is_stopped.set()
    assert outcome.status == "environment_error"
    assert "TimeoutError: the reward function returned nothing within 0.05 s" in outcome.reason
