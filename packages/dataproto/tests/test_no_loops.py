"""No operation on tensor columns loops over rows in Python: the number of executed lines does not depend on it."""

import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tidemill_dataproto import DataProto, pad_dataproto_to_divisor, ragged, unpad_dataproto

BATCHES: dict[str, Callable[[DataProto], Any]] = {
    "chunk": lambda b: b.chunk(4),
    "concat": lambda b: DataProto.concat([b, b]),
    "slice": lambda b: b[5:],
    "index": lambda b: b[torch.arange(len(b) - 1, -1, -1)],
    "mask": lambda b: b[b["x"] > 3],
    "reorder": lambda b: b.reorder(torch.arange(len(b) - 1, -1, -1)),
    "repeat": lambda b: b.repeat(2),
    "repeat by row": lambda b: b.sample_level_repeat(b["x"] % 3),
    "fold": lambda b: b.fold(4).unfold(),
    "pad": lambda b: unpad_dataproto(*pad_dataproto_to_divisor(b, len(b) - 1)),
    "pickle": lambda b: pickle.loads(pickle.dumps(b, 5)),
    "equal": lambda b: b == b.clone(),
    "repr": repr,
}
COLUMNS: dict[str, Callable[[DataProto], Any]] = {
    "ragged": lambda b: ragged.ragged(ragged.values(b["ids"]), ragged.lengths(b["ids"])),
    "concat_rows": lambda b: ragged.concat_rows(b["ids"], b["ids"]),
    "split_rows": lambda b: ragged.split_rows(b["ids"], ragged.lengths(b["ids"]) // 2),
    "index_rows": lambda b: ragged.index_rows(b["ids"], torch.arange(len(b) - 1, -1, -1)),
    "padded": lambda b: ragged.from_padded(
        ragged.to_padded(b["ids"], 0, side="left"), lengths=ragged.lengths(b["ids"]), side="left"
    ),
    "prompt and response": lambda b: ragged.to_prompt_response(b["ids"], b["places"], 0),
    "response_predictions": lambda b: ragged.response_predictions(ragged.concat_rows(b["ids"], b["ids"]), b["ids"]),
    "segments": lambda b: ragged.segment_mean(ragged.expand_rows(b["x"], b["ids"]), b["ids"]),
}


def lines_run(call: Callable[[DataProto], Any], num_rows: int, mean_length: int) -> int:
    """Count the lines of Python that the second call executes; the first may fill caches."""
    lengths = torch.arange(num_rows) % 3 + mean_length
    size = int(lengths.sum())
    places = ragged.ragged(torch.zeros(size, dtype=torch.int64), lengths)
    ids = ragged.ragged(torch.arange(size), lengths)
    batch = DataProto.from_dict({"x": torch.arange(num_rows), "ids": ids, "places": places})
    call(batch)
    count = 0

    def trace(_frame: Any, event: str, _arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call(batch)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("mean_length", [1, 300])  # long rows are copied in blocks
@pytest.mark.parametrize("name", [*BATCHES, *COLUMNS])
def test_number_of_executed_lines_does_not_depend_on_rows(name: str, mean_length: int) -> None:
    call = (BATCHES | COLUMNS)[name]
    more = lines_run(call, 2000, mean_length) - lines_run(call, 100, mean_length)
    assert abs(more) < 1900 // 10  # pickling needs a few lines per MiB


def test_line_count_detects_a_loop() -> None:
    loop = lambda b: [row for row in ragged.lengths(b["ids"]).tolist()]  # noqa: C416, E731
    assert lines_run(loop, 2000, 1) > lines_run(loop, 100, 1) + 1000
