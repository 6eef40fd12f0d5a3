"""A tokenizer whose tokens span several characters, and an engine that replies with given texts."""

import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tidemill_rollout import Generation, Policy, SamplingParams
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))  # for the helper modules in this folder

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_WITH_TOOLS = (
    '{% if tools %}<|im_start|>system\nCall a tool with <tool_call>{"name": ..., "arguments": ...}</tool_call>:'
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = ["hello world", "the answer is forty-two", "user assistant system tool", "what is the weather today"] * 50


class ScriptedEngine:
    """An engine with a given text for each request, in order; the last one is repeated.

    Attributes:
        requests: prompt and sampling parameters of each request.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str | list[int]]) -> None:
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self.requests: list[tuple[list[int], SamplingParams]] = []

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str) -> Generation:
        text = self._texts[min(len(self.requests), len(self._texts) - 1)]
        self.requests.append((list(token_ids), sampling))
        ids = self._tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else list(text)
        is_stopped = bool(ids) and ids[-1] in self._tokenizer.all_special_ids
        return Generation(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            finish_reason="stop" if is_stopped else "length",
            versions=[("0", len(ids))],
        )


@pytest.fixture(scope="session")
def bpe() -> Callable[..., PreTrainedTokenizerFast]:
    """`bpe(template, special_tokens)`: a byte-level BPE tokenizer; the last special token ends a reply."""

    @functools.cache
    def create(
        template: str | None = CHATML,
        special_tokens: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        bos_token: str | None = None,
    ) -> PreTrainedTokenizerFast:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=512, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(_CORPUS, trainer)
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=special_tokens[-1],
            bos_token=bos_token,
            additional_special_tokens=list(special_tokens[:-1]),
            chat_template=template,
        )

    return create


@pytest.fixture(scope="session")
def tokenizer(bpe) -> PreTrainedTokenizerFast:
    return bpe()


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory) -> Path:
    """An interpreter of its own: that of a virtual environment, with the packages of this one."""
    venv = tmp_path_factory.mktemp("interpreter") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    (next(venv.glob("lib/python*/site-packages")) / "shared.pth").write_text(str(site))
    return venv / "bin" / "python"


@pytest.fixture
def scripted(tokenizer):
    """`scripted("text<|im_end|>", ...)`: a policy whose engine replies with these texts."""

    def create(*texts: str | list[int], tokenizer=tokenizer, **settings) -> Policy:
        return Policy(ScriptedEngine(tokenizer, texts), tokenizer, **settings)

    return create


@pytest.fixture
def scripted_tools(bpe):
    """As `scripted`, for a model that calls tools with `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    tokenizer = bpe(CHATML_WITH_TOOLS)

    def create(*texts: str | list[int], **settings) -> Policy:
        return Policy(ScriptedEngine(tokenizer, texts), tokenizer, **settings)

    return create
