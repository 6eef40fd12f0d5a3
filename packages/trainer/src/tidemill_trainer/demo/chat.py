"""The chat format of a tiny model: messages as in ChatML, and tool calls as JSON in <tool_call> tags, as in Qwen3."""

import string
from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from tidemill_trainer.demo.model import piece_tokenizer

END = "<|im_end|>"
STARTS = tuple(f"<|im_start|>{role}\n" for role in ("system", "user", "assistant", "tool"))
# Of the tools only the names are rendered: a tiny model would learn nothing from their schemas.
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + (tools | map(attribute='function.name') | join(', ')) + '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def chat_tokenizer(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """Create a tokenizer with this chat format: one token for the start of a message, each of `pieces`, and each ASCII
    character."""
    return piece_tokenizer([*pieces, *string.printable], eos_token=END, special_tokens=STARTS, chat_template=TEMPLATE)
