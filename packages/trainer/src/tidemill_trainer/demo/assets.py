"""The files that the configurations of the demos refer to."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill_trainer.demo.addition import CHARACTERS, addition_rows
from tidemill_trainer.demo.shop import PIECES, conversation_rows, shop_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """What a demo trains on.

    Attributes:
        tokenizer: tokenizer of the model.
        max_length: maximum number of tokens of the model.
        train, val: problems.
        about: text for the report.
    """

    tokenizer: "PreTrainedTokenizerFast"
    max_length: int
    train: list[dict[str, Any]]
    val: list[dict[str, Any]]
    about: str


def _addition(seed: int) -> _Task:
    from tidemill_trainer.demo.model import piece_tokenizer

    train, val = addition_rows(num_digits=2, num_train=8192, num_val=512, seed=seed)
    return _Task(
        tokenizer=piece_tokenizer(CHARACTERS),
        max_length=64,
        train=train,
        val=val,
        about="The digits of a sum are written from right to left, as in addition by hand: the answer to 47+85= is "
        "231.",
    )


def _tools(seed: int) -> _Task:
    from tidemill_trainer.demo.chat import chat_tokenizer

    train, val = shop_rows(num_train=4096, num_val=256, seed=seed, hasty_share=0.75)
    return _Task(
        tokenizer=chat_tokenizer(PIECES),
        max_length=128,
        train=train,
        val=val,
        about="The model serves customers of a shop: it scans each item with a tool, which returns the total so far, "
        "and answers with the total. Three of four demonstrations with several items forget the last item.",
    )


def _sft(seed: int) -> _Task:
    from tidemill_trainer.demo.chat import chat_tokenizer

    train, val = conversation_rows(num_train=2048, num_val=256, seed=seed)
    return _Task(
        tokenizer=chat_tokenizer(PIECES),
        max_length=128,
        train=train,
        val=val,
        about="Conversations in which the assistant scans the items of a customer with a tool, and answers with the "
        "total. Only the assistant's messages are trained on.",
    )


_TASKS = {"addition": _addition, "tools": _tools, "sft": _sft}


def write_assets(folder: Path, seed: int = 0, task: str = "addition") -> list[str]:
    """Write `model/`, `train.jsonl`, `val.jsonl` and, for the report, `about.txt` to `folder`.

    Args:
        folder: folder to create.
        seed: seed of the weights and the problems.
        task: "addition", "tools" or "sft".

    Returns:
        `key=value` overrides with the paths of these files.
    """
    from tidemill_trainer.demo.model import write_model  # its import takes seconds, which episode workers save

    made = _TASKS[task](seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", made.tokenizer, max_length=made.max_length, seed=seed)
    _write_jsonl(folder / "train.jsonl", made.train)
    _write_jsonl(folder / "val.jsonl", made.val)
    (folder / "about.txt").write_text(made.about)
    return [
        f"model.path={folder / 'model'}",
        f'data.train_files=["{folder / "train.jsonl"}"]',
        f'data.val_files=["{folder / "val.jsonl"}"]',
    ]


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
