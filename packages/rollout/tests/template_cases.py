"""Chat templates with the special tokens of their models, and a chat whose replies a test chooses."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidemill_rollout import Generation, Policy, Reply, SamplingParams, Trajectory
from transformers import PreTrainedTokenizerFast

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
SYSTEM = {"role": "system", "content": "the answer is short"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(text: str, call_id: str = "call-0-0") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def published(name: str) -> str:
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>", "<|user|>")

PLAIN_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
SYSTEM_WITH_LAST_USER = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}[INST] {% if loop.last %}{{ system }} {% endif %}{{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
REMOVES_ALL_REASONING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content.split('</think>')[-1] }}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A chat template with what its model writes.

    Attributes:
        special_tokens: the last one ends a reply.
        call: format of the text of a tool call; empty without tools.
        thinks: the model writes `<think>` blocks.
        opens_thinking: the prompt ends with `<think>`.
        closes: the template writes the end token after a reply.
        has_system: the template accepts a system message.
        lead: what the model writes before the content.
    """

    name: str
    template: str
    special_tokens: tuple[str, ...] = _CHATML
    bos_token: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    call: str = ""
    thinks: bool = False
    opens_thinking: bool = False
    closes: bool = True
    has_system: bool = True
    lead: str = ""

    @property
    def end(self) -> str:
        return self.special_tokens[-1]

    def tokenizer(self, bpe) -> PreTrainedTokenizerFast:
        return bpe(self.template, self.special_tokens, bos_token=self.bos_token)

    def reply(self, content: str, *, reasoning: str = "", calls: Sequence[dict] = ()) -> str:
        """Return a reply as the template writes it."""
        text = self.lead + content
        for arguments in calls:
            text += ("\n" if text else "") + self.call % json.dumps(arguments, ensure_ascii=False)
        if self.thinks:
            text = f"<think>\n{reasoning}\n</think>\n\n{text}".removeprefix("<think>\n" * self.opens_thinking)
        return text + self.end


_HERMES = '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'
_QWEN3 = published("qwen3")
_NO_THINKING = _QWEN3.index("    {%- if enable_thinking is defined")

QWEN25 = Family(name="qwen2.5", template=published("qwen2_5"), call=_HERMES)
QWEN3 = Family(name="qwen3", template=_QWEN3, call=_HERMES, thinks=True)
QWEN3_NO_THINKING = Family(name="qwen3-no-thinking", template=_QWEN3, call=_HERMES, kwargs={"enable_thinking": False})
# Qwen3-Thinking-2507 differs from Qwen3 in its generation prompt.
QWEN3_THINKING = Family(
    name="qwen3-thinking-2507",
    template=_QWEN3[:_NO_THINKING].replace("assistant\\n' }}\n", "assistant\\n<think>\\n' }}\n") + "{%- endif %}",
    call=_HERMES,
    thinks=True,
    opens_thinking=True,
)
LLAMA3 = Family(name="llama3", template=published("llama3"), special_tokens=_LLAMA3, bos_token="<|begin_of_text|>")
LLAMA31 = Family(
    name="llama3.1",
    template=published("llama3_1"),
    special_tokens=_LLAMA3,
    bos_token="<|begin_of_text|>",
    call='{"name": "weather", "parameters": %s}',
)
CHATML = Family(name="chatml", template=PLAIN_CHATML)
GLM = Family(name="glm4.5", template=published("glm4_5"), special_tokens=_GLM, closes=False, lead="\n<think></think>\n")
MISTRAL_LIKE = Family(
    name="mistral-like", template=MISTRAL, special_tokens=("<s>", "</s>"), bos_token="<s>", has_system=False, lead=" "
)
FAMILIES = [QWEN25, QWEN3, QWEN3_NO_THINKING, QWEN3_THINKING, LLAMA3, LLAMA31, CHATML, GLM, MISTRAL_LIKE]
WITH_TOOLS = [family for family in FAMILIES if family.call]


class _NextReply:
    """An engine that returns the reply that the test has set."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.finish_reason = "stop"
        self.prompts: list[list[int]] = []

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str) -> Generation:
        self.prompts.append(list(token_ids))
        ids = list(self.ids)
        return Generation(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            finish_reason=self.finish_reason,  # type: ignore[arg-type]
            versions=[("0", len(ids))] if ids else [],
        )


class Chat:
    """A client that sends the whole conversation with each request.

    Attributes:
        messages: the conversation with all replies.
        sampled: the sampled tokens of all replies.
    """

    def __init__(self, family: Family, bpe, *, tools: Any = None, **settings: Any) -> None:
        self.family = family
        self.tokenizer = family.tokenizer(bpe)
        self.engine = _NextReply()
        policy = Policy(self.engine, self.tokenizer, template_kwargs=family.kwargs, **settings)
        self.session = policy.session()
        self.tools = tools
        self.messages: list[dict[str, Any]] = []
        self.sampled: list[int] = []

    def ask(self, *new: dict[str, Any], reply: str | list[int], finish: str | None = None, **kwargs: Any) -> Reply:
        """Append messages, receive this reply and append it too."""
        self.messages += new
        got = self.send(self.messages, reply=reply, finish=finish, **kwargs)
        self.messages.append(got.message)
        return got

    def send(
        self, messages: Any, *, reply: str | list[int], finish: str | None = None, session: Any = None, **kwargs: Any
    ) -> Reply:
        """Send any messages and receive this reply."""
        ids = self.tokenizer.encode(reply, add_special_tokens=False) if isinstance(reply, str) else list(reply)
        is_stopped = bool(ids) and ids[-1] in self.tokenizer.all_special_ids
        self.engine.ids = ids
        self.engine.finish_reason = finish or ("stop" if is_stopped else "length")
        self.sampled += ids
        kwargs.setdefault("tools", self.tools)
        return asyncio.run((session or self.session).generate(messages, **kwargs))

    def rows(self) -> list[Trajectory]:
        return self.session.trajectories()

    def row(self) -> Trajectory:
        (row,) = self.rows()
        return row

    def rendered(self, messages: Sequence[dict[str, Any]] | None = None, **kwargs: Any) -> str:
        """Return the template's own text of a conversation; arguments of tool calls as objects."""
        messages = self.messages if messages is None else messages
        plain = json.loads(json.dumps(list(messages)))
        for call in (call for message in plain for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return self.tokenizer.apply_chat_template(
            plain, tools=self.tools, tokenize=False, **self.family.kwargs, **kwargs
        )  # type: ignore[return-value]

    def trained(self) -> list[int]:
        """Return the tokens with mask 1 of all rows."""
        return [
            token
            for row in self.rows()
            for token, mask in zip(row.response_ids, row.response_mask, strict=True)
            if mask
        ]

    @property
    def forks(self) -> dict[str, int]:
        return dict(self.session.recorder.forks)
