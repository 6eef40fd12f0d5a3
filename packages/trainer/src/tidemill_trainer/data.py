"""Problems: read from files, tokenised once, and drawn in an order that depends on the seed and the step alone."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tidemill_dataproto import DataProto, ragged
from transformers import PreTrainedTokenizerBase

from tidemill_trainer.config import DataConfig


class DataError(ValueError):
    """A data file cannot be used; the text names file and row."""


def load_prompts(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    needs_ground_truth: bool = False,
) -> tuple[DataProto, int]:
    """Reads and tokenises all rows of `files`.

    Args:
        needs_ground_truth: refuse a row that has none.

    Returns:
        A batch of one row per problem with the ragged int64 column `prompts` [B, j] and the object columns
        `data_source`, `ground_truth`, `extra_info` and `response` (None where the file has none), and the number of
        rows left out because their prompt is longer than `max_prompt_length`.

    Raises:
        DataError: a missing or unreadable file, a row without a prompt or with one that the chat template does not
            take, a prompt that is too long (unless skipped), or no rows at all.
    """
    prompts: list[torch.Tensor] = []
    columns: dict[str, list[Any]] = {"data_source": [], "ground_truth": [], "extra_info": [], "response": []}
    num_skipped = 0
    for file in files:
        for number, row in enumerate(_read_rows(Path(file)), start=1):
            where = f"{file}, row {number}"
            ids = _encode_prompt(row, tokenizer, where)
            if len(ids) > config.max_prompt_length:
                if config.overlong_prompts == "skip":
                    num_skipped += 1
                    continue
                raise DataError(
                    f"{where}: the prompt has {len(ids)} tokens, more than data.max_prompt_length="
                    f'{config.max_prompt_length}; raise it, or set data.overlong_prompts="skip"'
                )
            ground_truth = _ground_truth(row)
            if ground_truth is None and needs_ground_truth:
                raise DataError(f"{where}: no `ground_truth`, without which reward.function scores 0 always")
            prompts.append(torch.tensor(ids, dtype=torch.int64))
            columns["data_source"].append(row.get("data_source") or "data")
            columns["ground_truth"].append(ground_truth)
            columns["extra_info"].append(row.get("extra_info"))
            response = row.get("response")
            if response is not None and not isinstance(response, str):
                raise DataError(f"{where}: expected `response` as a string, got {response!r}")
            columns["response"].append(response)
    if not prompts:
        left_out = f" ({num_skipped} had a prompt longer than {config.max_prompt_length} tokens)" if num_skipped else ""
        raise DataError(f"no problems in {', '.join(files) or 'an empty list of files'}{left_out}")
    return DataProto.from_dict({"prompts": ragged.ragged_from_list(prompts)}, columns), num_skipped


class PromptLoader:
    """Draws batches of problems. The batch of a step is a function of seed and step, so there is no state to save.

    Args:
        dataset: what `load_prompts` returned.
        batch_size: problems per step; a batch may reach over the end of an epoch.
        seed: each epoch has its own permutation of the rows, drawn from it.
    """

    def __init__(self, dataset: DataProto, batch_size: int, seed: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed

    def batch(self, step: int) -> DataProto:
        """The problems of `step` (from 1), with a new object column `uid` that is different for each of them."""
        size = len(self._dataset)
        positions = np.arange((step - 1) * self._batch_size, step * self._batch_size)
        rows = np.empty(self._batch_size, dtype=np.int64)
        for epoch in np.unique(positions // size):
            order = np.random.default_rng([self._seed, int(epoch)]).permutation(size)
            here = positions // size == epoch
            rows[here] = order[positions[here] % size]
        batch = self._dataset[torch.from_numpy(rows)]
        uid = [f"{step}-{number}" for number in range(self._batch_size)]
        return batch.union(DataProto.from_dict({}, {"uid": uid}))


def with_responses(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> DataProto:
    """The columns for supervised fine-tuning, `responses`, `response_mask`, `input_ids`, from the texts `response`.

    Raises:
        DataError: a row has no `response`.
    """
    rows = []
    for text in batch.non_tensor_batch["response"]:
        if text is None:
            raise DataError("the warm-up needs rows with a `response`; set warmup.max_steps=0 to train without it")
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append(torch.tensor(ids, dtype=torch.int64))
    responses = ragged.ragged_from_list(rows)
    columns = {
        "responses": responses,
        "response_mask": ragged.like(torch.ones(responses.values().shape[0]), responses),
        "input_ids": ragged.concat_rows(batch["prompts"], responses),
    }
    return DataProto.from_dict(columns)


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"there is no data file {path.absolute()}")
    if path.suffix == ".parquet":
        try:
            for batch in DataProto.iter_parquet(path, as_objects=True):
                yield from (item.non_tensor_batch for item in batch)
        except ValueError as error:
            raise DataError(str(error)) from error
        return
    if path.suffix != ".jsonl":
        raise DataError(f"{path}: expected a .jsonl or .parquet file")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{path}, row {number}: not JSON in UTF-8: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, row {number}: expected an object, got {str(row)[:60]}")
            yield row


def _encode_prompt(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special_tokens=False)
    elif isinstance(prompt, list):
        try:
            encoded = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
        except Exception as error:  # a template may raise anything, and there may be none
            raise DataError(f"{where}: the model's chat template does not take these messages: {error}") from error
        ids = encoded["input_ids"]  # type: ignore[index]
    else:
        raise DataError(f"{where}: expected `prompt` as a string or a list of messages, got {prompt!r}")
    if not ids:
        raise DataError(f"{where}: the prompt {prompt!r} has no tokens")
    return [int(token) for token in ids]


def _ground_truth(row: dict[str, Any]) -> Any:
    if "ground_truth" in row:
        return row["ground_truth"]
    nested = row.get("reward_model")  # where verl's files have it
    return nested.get("ground_truth") if isinstance(nested, dict) else None
