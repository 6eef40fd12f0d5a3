"""What verl loads for `bench/verl.py`, in its own environment, through keys of its configuration."""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput  # pyright: ignore[reportMissingImports]
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer  # pyright: ignore[reportMissingImports]


class FixedLengthLoop(SingleTurnAgentLoop):
    """Generate responses with the lengths in `extra_info["lengths"]` of the problem, one per response."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        length = int(kwargs["extra_info"]["lengths"][kwargs["session_id"]])
        return await super().run({**sampling_params, "max_new_tokens": length, "ignore_eos": True}, **kwargs)


class FrequentReplayBuffer(ReplayBuffer):
    """Look for finished responses every 0.1 s; verl's own pause of 2 s would round generation up to it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=0.1)
