"""Demonstrations: given conversations as training rows for supervised fine-tuning."""

from collections.abc import Sequence
from typing import Any

from tidemill_rollout.engine import Generation
from tidemill_rollout.errors import TemplateError
from tidemill_rollout.messages import Message, clean_message
from tidemill_rollout.recorder import Recorder
from tidemill_rollout.template import ChatTemplate
from tidemill_rollout.trajectory import Trajectory


def demonstration(
    template: ChatTemplate,
    prompt: Sequence[Message],
    response: Sequence[Message],
    tools: Sequence[Any] | None = None,
) -> Trajectory:
    """Return the row that the recorder creates if the model replies as in `response`.

    Args:
        template: the model's chat template.
        prompt: messages before the first reply.
        response: replies of the assistant, which have mask 1, and what follows each of them, such as tool results. The
            first and the last message are replies.
        tools: tools of the conversation in OpenAI's format.

    Returns:
        The row, with log-probs of 0.

    Raises:
        ValueError: malformed messages, or the first or last one of the response is not from the assistant.
        TemplateError: the chat template rejects the messages, or it changes an earlier reply once the next messages
            follow, as Qwen3 does with reasoning before a user message.
    """
    messages = [clean_message(message, number) for number, message in enumerate([*prompt, *response])]
    if not response or {messages[len(prompt)]["role"], messages[-1]["role"]} != {"assistant"}:
        roles = [message["role"] for message in messages[len(prompt) :]]
        raise ValueError(f"a demonstration must start and end with a reply of the assistant, got the roles {roles}")
    recorder = Recorder(template)
    for number in range(len(prompt), len(messages)):
        if messages[number]["role"] != "assistant":
            continue
        request = recorder.prompt_from_messages(messages[:number], tools, "main")
        if request.fork is not None:
            raise TemplateError(
                f"the chat template changes earlier replies in the prompt of messages[{number}]; expected "
                f"{request.fork.expected!r}, got {request.fork.received!r}; split the demonstration there"
            )
        ids = template.reply(messages[: number + 1], tools)
        reply = Generation(token_ids=ids, log_probs=[0.0] * len(ids), finish_reason="stop", versions=[("", len(ids))])
        recorder.record(request, reply, messages[number])
    (row,) = recorder.trajectories(["main"])
    return row
