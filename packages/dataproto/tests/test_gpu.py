"""On CUDA no operation waits for the device unless it says so."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tidemill_dataproto import DataProto, pad_dataproto_to_divisor, ragged, rearrange_micro_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EMPTY_ROWS = dict.fromkeys(["input_ids", "response_mask", "position_ids"])
LENGTHS = [3, 0, 700, 1, 900, 2, 5, 0]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def host_batch() -> DataProto:
    size = sum(LENGTHS)
    ids = ragged.ragged(torch.arange(size), LENGTHS)
    tensors = {
        "input_ids": ids,
        "response_mask": ragged.like(torch.ones(size), ids),
        "position_ids": ragged.ragged(torch.arange(3 * 16).reshape(16, 3), [2] * 8),
        "x": torch.randn(8, 4),
    }
    return DataProto.from_dict(tensors, {"uid": [f"u{i}" for i in range(8)]}, {"step": 1})


@pytest.fixture
def batch() -> DataProto:
    on_device = host_batch().to("cuda")
    _ = on_device.batch  # somebody has looked
    return on_device


def test_the_check_itself_sees_waiting() -> None:
    flag = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="synchron"), no_waiting():
        flag.item()


@pytest.mark.parametrize(
    "operation",
    [
        lambda b: b.chunk(3, allow_unequal=True)[1],
        lambda b: b.split(3)[2],
        lambda b: b[2:5],
        lambda b: b[[4, 2, 2, 1]],
        lambda b: b.reorder([7, 6, 5, 4, 3, 2, 1, 0]),
        lambda b: b.repeat(2),
        lambda b: b.repeat([2, 0, 1, 3, 0, 1, 1, 1]),
        lambda b: DataProto.concat([b, b]),
        lambda b: DataProto.concat([b, b.select(["x"])], fill=EMPTY_ROWS),
        lambda b: b.select(["x"]).union(b.select(["input_ids"])),
        lambda b: b.rename("x", "y"),
        lambda b: b.clone(),
        lambda b: b.fold(2).unfold(),
        lambda b: pad_dataproto_to_divisor(b, 3)[0],
        lambda b: rearrange_micro_batches(b, 1000)[0][0],
        lambda b: next(b.make_iterator(3, seed=1)),
        lambda b: DataProto.from_items(list(b), ["x"]),
    ],
)  # fmt: skip
def test_operations_on_batches_do_not_wait(operation, batch: DataProto) -> None:
    with no_waiting():
        result = operation(batch)
        for column in result.batch.values():
            assert column.device.type == "cuda"
        parts = result.chunk(2, allow_unequal=True)
    assert result.to("cpu") == operation(host_batch())
    assert DataProto.concat(parts).to("cpu") == result.to("cpu")


def test_ragged_functions_do_not_wait(batch: DataProto) -> None:
    def run(b: DataProto) -> list[torch.Tensor]:
        ids, mask = b["input_ids"], b["response_mask"]
        head = [length // 2 for length in LENGTHS]
        first, second = ragged.split_rows(ids, head)
        outputs = ragged.concat_rows(b["position_ids"], b["position_ids"])
        padded = ragged.to_padded(ids, -1, side="left")
        per_row = ragged.segment_sum(ragged.values(mask), mask)
        return [
            ragged.values(ragged.concat_rows(first, second)),
            ragged.values(ragged.response_predictions(outputs, b["position_ids"])),
            ragged.values(ragged.index_rows(ids, [2, 4])),
            ragged.values(ragged.from_padded(padded, lengths=LENGTHS, side="left")),
            ragged.to_prompt_response(first, second, 0),
            ragged.expand_rows(per_row, ids),
            ragged.segment_mean(ragged.values(ids), ids),
            ragged.segment_sum(ragged.values(ids), ids),
            ragged.values(ragged.ragged(ragged.values(ids), LENGTHS)),
            (ids * mask).values(),
            padded,
        ]

    with no_waiting():
        results = run(batch)
        assert ragged.host_lengths(batch["input_ids"]).tolist() == LENGTHS
    for ours, expected in zip(results, run(host_batch()), strict=True):
        torch.testing.assert_close(ours.cpu(), expected)


def test_gradients_flow_without_waiting(batch: DataProto) -> None:
    weights = torch.randn(sum(LENGTHS), device="cuda", requires_grad=True)
    with no_waiting():
        batch.batch["weights"] = ragged.like(weights, batch["input_ids"])
        part = batch[[2, 4, 2]]
        ragged.segment_mean(ragged.values(part["weights"]), part["weights"]).sum().backward()
    expected = [0.0] * 3 + [2 / 700] * 700 + [0.0] + [1 / 900] * 900 + [0.0] * 7
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad.cpu(), torch.tensor(expected))


def test_to_the_device_and_back() -> None:
    host = host_batch()
    pinned = DataProto.from_dict({"x": torch.randn(8, 4).pin_memory()})
    with no_waiting():
        pinned = pinned.to("cuda", non_blocking=True)
    assert host.to("cuda").to("cpu") == host
    assert host.to("cuda") != host  # on other devices
    moved = host.to("cuda")
    assert ragged.offsets(moved["input_ids"]) is ragged.offsets(moved["response_mask"])
    assert pinned["x"].device.type == "cuda"


def test_what_torch_has_made_is_read_once() -> None:
    column = torch.nested.nested_tensor_from_jagged(
        torch.arange(5, device="cuda"), torch.tensor([0, 2, 2, 5], device="cuda")
    )
    batch = DataProto.from_dict({"c": column})
    with no_waiting():
        again = DataProto.from_dict({"c": column + 1, "d": column})
        parts = again.chunk(3)
    assert [ragged.values(part["c"]).tolist() for part in parts] == [[1, 2], [], [3, 4, 5]]
    assert batch["c"] is column


def test_pickled_from_the_device_and_saved(tmp_path, batch: DataProto) -> None:
    import pickle

    assert pickle.loads(pickle.dumps(batch)) == host_batch() or batch.to("cpu") == pickle.loads(pickle.dumps(batch))
    batch.save(tmp_path / "batch")
    assert DataProto.load(tmp_path / "batch") == batch.to("cpu")
