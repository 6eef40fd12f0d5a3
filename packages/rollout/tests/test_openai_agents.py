"""An unmodified agent framework, the OpenAI Agents SDK, trained through the endpoint."""

import asyncio

import openai
from tidemill_rollout import Endpoint, Problem


def test_tool_loop_of_the_agents_sdk_is_recorded_as_one_sequence(scripted_tools):
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool

    cities = []

    @function_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        cities.append(city)
        return "sunny"

    client = openai.AsyncOpenAI(api_key="set by with_options")

    async def episode(problem, session):
        own = client.with_options(base_url=session.base_url, api_key=session.api_key)
        agent = Agent(
            name="assistant",
            instructions="what is the weather today",
            tools=[weather],
            model=OpenAIChatCompletionsModel(model="policy", openai_client=own),
            model_settings=ModelSettings(max_tokens=100),
        )
        result = await Runner.run(agent, problem.prompt, run_config=RunConfig(tracing_disabled=True))
        return float(result.final_output == "it is sunny")

    async def run():
        async with asyncio.timeout(60), Endpoint() as endpoint:
            call = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call><|im_end|>'
            replies = (call % "Paris", f"hello {call % 'Rome'}", "it is sunny<|im_end|>")
            return await scripted_tools(*replies, endpoint=endpoint).run(episode, Problem(prompt="hello"))

    result = asyncio.run(run())
    assert (result.outcome.status, result.outcome.reward) == ("ok", 1.0), result.outcome.reason
    assert cities == ["Paris", "Rome"]
    (row,) = result.trajectories
    assert len(row.turns) == 3
    assert result.metrics["num_trained_tokens"] == result.metrics["num_sampled_tokens"]
    assert not [name for name in result.metrics if name.startswith("num_forks")]
