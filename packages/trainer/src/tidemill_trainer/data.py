"""Problems: read from files, tokenized once, and drawn in an order that depends only on the seed and the step."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_rollout import ChatTemplate, Problem, Trajectory, demonstration
from tidemill_rollout.messages import check_messages
from transformers import PreTrainedTokenizerBase

from tidemill_trainer.config import DataConfig
from tidemill_trainer.sft.example import Example, end_of_reply, to_batch

_PROBLEM_COLUMNS = ("prompt", "data_source", "ground_truth", "extra_info", "tools")
"""Object columns of a batch of `load_prompts` that are attributes of a `Problem`."""
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")  # as JSON, or as Python shows it


class DataError(ValueError):
    """A data file is invalid; the message names file, row and key."""


def load_prompts(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    needs_ground_truth: bool = False,
) -> tuple[DataProto, int]:
    """Read and tokenize all rows of `files`.

    Args:
        files: paths of `.jsonl` or `.parquet` files.
        tokenizer: tokenizer of the model.
        config: limits of the prompts.
        needs_ground_truth: reject rows without a `ground_truth`.

    Returns:
        A batch with one row per problem and the number of skipped rows, whose prompt is longer than
        `max_prompt_length`. The batch has the ragged int64 column `prompts` [B, j] and the object columns `prompt` (as
        in the file), `data_source`, `ground_truth`, `extra_info`, `tools` and `response` (the text, a `Trajectory` for
        messages, or None).

    Raises:
        DataError: a file is missing or cannot be read, a row has no prompt or one that the chat template rejects, a
            prompt is too long (unless skipped), or there are no rows.
    """
    prompts: list[torch.Tensor] = []
    columns: dict[str, list[Any]] = {name: [] for name in (*_PROBLEM_COLUMNS, "response")}
    num_skipped = 0
    template = ChatTemplate(tokenizer)
    for file in files:
        for number, row in enumerate(read_rows(Path(file)), start=1):
            where = f"{file}, row {number}"
            try:
                ids = encode_prompt(row, template)
            except ValueError as error:
                raise DataError(f"{where}: {error}") from error
            if len(ids) > config.max_prompt_length:
                if config.overlong_prompts == "skip":
                    num_skipped += 1
                    continue
                raise DataError(
                    f"{where}: the prompt must have at most data.max_prompt_length={config.max_prompt_length} tokens, "
                    f'got {len(ids)}; raise the limit, or set data.overlong_prompts="skip"'
                )
            ground_truth = _ground_truth(row)
            if ground_truth is None and needs_ground_truth:
                raise DataError(
                    f'{where}: expected a `ground_truth`, which reward.function="exact_match" requires; add it, or '
                    "choose another reward function"
                )
            prompts.append(torch.tensor(ids, dtype=torch.int64))
            columns["prompt"].append(row["prompt"])
            columns["data_source"].append(str(row.get("data_source") or "data"))
            columns["ground_truth"].append(ground_truth)
            columns["extra_info"].append(row.get("extra_info"))
            columns["tools"].append(row.get("tools"))
            columns["response"].append(_response(row, template, where))
    if not prompts:
        reason = f" ({num_skipped} have a prompt longer than {config.max_prompt_length} tokens)" if num_skipped else ""
        source = ", ".join(files) or "data.train_files, which is empty"
        raise DataError(f"expected problems in {source}, got none{reason}")
    return DataProto.from_dict({"prompts": ragged.ragged_from_list(prompts)}, columns), num_skipped


def shuffled_rows(size: int, seed: int, start: int, count: int) -> np.ndarray:
    """Return the numbers, int64 [count], of the rows from the ordinal `start` on in an endless sequence of epochs.

    Each epoch has all `size` rows, in an order given by the seed and the epoch.
    """
    positions = np.arange(start, start + count)
    rows = np.empty(count, dtype=np.int64)
    for epoch in np.unique(positions // size):
        order = np.random.default_rng([seed, int(epoch)]).permutation(size)
        here = positions // size == epoch
        rows[here] = order[positions[here] % size]
    return rows


class PromptLoader:
    """Draw batches of problems. The batch of a step is a function of seed and step, so there is no state to save.

    Args:
        dataset: a batch returned by `load_prompts`.
        batch_size: problems per step; a batch may continue into the next epoch.
        seed: seed of the permutation of the rows, which is different in each epoch.
    """

    def __init__(self, dataset: DataProto, batch_size: int, seed: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed

    def rows(self, step: int) -> np.ndarray:
        """Return the row numbers of the problems of `step` (from 1), int64 [batch_size]."""
        return self.rows_at((step - 1) * self._batch_size, self._batch_size)

    def rows_at(self, start: int, count: int) -> np.ndarray:
        """Return the row numbers of `count` problems from the ordinal `start` on, int64 [count]."""
        return shuffled_rows(len(self._dataset), self._seed, start, count)

    def batch(self, step: int) -> DataProto:
        """Return the problems of `step`."""
        return self._dataset[torch.from_numpy(self.rows(step))]

    def problems(self, start: int, count: int, step: int, first: int = 0) -> list[Problem]:
        """Return `count` problems of `step` from the ordinal `start` on, with the ids "step-first" and following."""
        batch = self._dataset[torch.from_numpy(self.rows_at(start, count))]
        return to_problems(batch, str(step), ordinal=start, first=first)


HELD_OUT = 1 << 30
"""Ordinal of the first problem of a validation or evaluation: environments that take it as their seed start in other
states than those of the training.
"""


def to_problems(batch: DataProto, prefix: str, *, ordinal: int = 0, first: int = 0) -> list[Problem]:
    """Return the rows of a batch of `load_prompts` as problems with the ids "{prefix}-0", "{prefix}-1", ...

    Args:
        batch: the rows.
        prefix: start of the ids.
        ordinal: ordinal of the first problem.
        first: number in the id of the first problem.
    """
    columns = [batch.non_tensor_batch[name] for name in _PROBLEM_COLUMNS]
    rows = [dict(zip(_PROBLEM_COLUMNS, values, strict=True)) for values in zip(*columns, strict=True)]
    return [
        Problem(id=f"{prefix}-{first + number}", ordinal=ordinal + number, **row) for number, row in enumerate(rows)
    ]


def with_responses(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> DataProto:
    """Return `responses`, `response_mask` and `input_ids` of the rows' `response` for supervised fine-tuning.

    Raises:
        DataError: a row has no `response`.
    """
    examples = []
    columns = batch.non_tensor_batch
    is_chat = [isinstance(prompt, list) for prompt in columns["prompt"]]
    template, end = ChatTemplate(tokenizer), end_of_reply(tokenizer) if any(is_chat) else None
    for ids, has_messages, response in zip(batch["prompts"].unbind(), is_chat, columns["response"], strict=True):
        if response is None:
            raise DataError("the warm-up requires a `response` in every row; add it, or set warmup.max_steps=0")
        if isinstance(response, Trajectory):
            examples.append(Example.of_trajectory(response))
        else:
            examples.append(Example.of_text(ids.tolist(), response, template, end=end if has_messages else None))
    return to_batch(examples)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `.jsonl` or `.parquet` file as dicts, without blank lines.

    Arrow gives all structs of a column the same fields, and reads a field that a struct does not have as null. So a
    missing field and a null are the same in Parquet, and both are left out of the dicts in a column, at any depth.
    Null items of lists and null columns stay None.

    Raises:
        DataError: the file is missing or cannot be read; the message names file and row.
    """
    if path.is_dir():
        raise DataError(
            f"expected a .jsonl or .parquet file, but {path.absolute()} is a folder; list its files in "
            "data.train_files or data.val_files"
        )
    if not path.is_file():
        hint = "; patterns are not expanded, list the files" if set(path.name) & set("*?[") else ""
        raise DataError(f"data file {path.absolute()} does not exist; check data.train_files and data.val_files{hint}")
    if path.suffix == ".parquet":
        try:
            for batch in DataProto.iter_parquet(path, as_objects=True):
                for item in batch:
                    yield {name: _without_null_fields(value) for name, value in item.non_tensor_batch.items()}
        except ValueError as error:
            raise DataError(str(error)) from error
        return
    if path.suffix != ".jsonl":
        raise DataError(f"{path}: expected a file name that ends in .jsonl or .parquet, got {path.name!r}")
    with path.open("rb") as lines:
        for number, line in enumerate(filter(bytes.strip, lines), start=1):
            try:
                row = _parse_row(line)
            except ValueError as error:
                raise DataError(f"{path}, row {number}: {error}") from error
            yield row


def _without_null_fields(value: Any) -> Any:
    """Return a value of a parquet file without the null fields of its structs."""
    if isinstance(value, dict):
        return {name: _without_null_fields(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [_without_null_fields(item) for item in value]
    return value


def _parse_row(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line of a `.jsonl` file.

    Raises:
        ValueError: the line is no JSON object in UTF-8, or has values that cannot be read or tokenized.
    """
    if b"\0" in line:  # JSON writes them as \u0000
        raise ValueError(
            "expected JSON in UTF-8, got null bytes, which text in UTF-16 or UTF-32 has; convert the file to UTF-8"
        )
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_int=_parse_integer)
        if not isinstance(row, dict):
            raise ValueError(f"expected a JSON object, got {repr(row)[:60]}")
        if b"\\ud" in line.lower():  # an escaped half of a surrogate pair
            _check_surrogates(row)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"expected JSON in UTF-8: {error}") from error
    except RecursionError as error:
        raise ValueError("lists and objects are nested too deeply; flatten them, or store them as JSON text") from error
    return row


def _parse_integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:
        limit = sys.get_int_max_str_digits()
        raise ValueError(
            f"expected integers of at most {limit} digits, got one of {len(digits.lstrip('-'))}; write it as a string"
        ) from error


def _check_surrogates(row: dict[str, Any]) -> None:
    """Raise ValueError if a text contains half of a surrogate pair without the other."""
    for name, value in row.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"column {name!r} has half of a surrogate pair, {error.object[error.start]!r}, which UTF-8 cannot "
                "represent; correct the text, or remove the row"
            ) from error


def encode_prompt(row: Mapping[str, Any], template: ChatTemplate) -> list[int]:
    """Return the tokens of the `prompt` of a row: a text, or messages with the start of a reply, as of an episode.

    Raises:
        ValueError: there is no prompt, it is empty, its messages are invalid, or the chat template rejects them.
    """
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        if _MESSAGES_AS_TEXT.match(prompt):
            raise ValueError(
                f"expected `prompt` as a list of messages or as a text, got messages that are written as a text, "
                f"{prompt[:60]!r}; store the list itself"
            )
        ids = template.encode(prompt)
    elif isinstance(prompt, list):
        if template.source is None:
            raise ValueError(
                "messages require a chat template, and the tokenizer of the model has none; add chat_template.jinja to "
                "its folder, or write the prompt as a text"
            )
        ids = template.encode(template.render(check_messages(prompt), row.get("tools"), add_generation_prompt=True))
    else:
        found = repr(prompt) if "prompt" in row else f"no such key among {list(row)}"
        raise ValueError(f"expected `prompt` as a string or a list of messages, got {found}")
    if not ids:
        raise ValueError(f"expected a `prompt` with at least one token, got {prompt!r}")
    return ids


def _response(row: dict[str, Any], template: ChatTemplate, where: str) -> str | Trajectory | None:
    """Return the demonstration of a row: a text, or the tokens of messages as an episode would record them."""
    response = row.get("response")
    if response is None or isinstance(response, str):
        return response
    if not isinstance(response, list) or isinstance(row["prompt"], str):
        raise DataError(
            f"{where}: expected `response` as a string or, if the prompt is a list of messages, as a list of messages, "
            f"got {response!r}"
        )
    try:
        return demonstration(template, row["prompt"], response, row.get("tools"))
    except ValueError as error:
        raise DataError(f"{where}: expected a `response` that continues the prompt: {error}") from error


def _ground_truth(row: dict[str, Any]) -> Any:
    if row.get("ground_truth") is not None:
        return row["ground_truth"]
    nested = row.get("reward_model")  # verl's format
    return nested.get("ground_truth") if isinstance(nested, dict) else None
