"""On CUDA, operations do not wait for the device, except those that document it."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from device_cases import LENGTHS, OPERATIONS, host_batch, index_arithmetic, on_device, sums
from tidemill_dataproto import DataProto, all_gather, prepare_dynamic_batch, ragged
from tidemill_testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def batch() -> DataProto:
    return on_device("cuda")


def test_sync_check_detects_waiting() -> None:
    flag = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="synchron"), no_waiting():
        flag.item()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_on_batches_do_not_wait(operation: str, batch: DataProto) -> None:
    with no_waiting():
        result = OPERATIONS[operation](batch)
        assert all(column.device.type == "cuda" for column in result.batch.values())
        parts = result.chunk(2, allow_unequal=True)
    assert result.to("cpu") == OPERATIONS[operation](host_batch())
    assert DataProto.concat(parts).to("cpu") == DataProto.concat([result]).to("cpu")


@pytest.mark.parametrize("functions", [index_arithmetic, sums])
def test_ragged_functions_do_not_wait(functions, batch: DataProto) -> None:
    with no_waiting():
        results = functions(batch)
        assert ragged.host_lengths(batch["input_ids"]).tolist() == LENGTHS
    for ours, expected in zip(results, functions(host_batch()), strict=True):
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


def test_to_device_and_back_is_the_identity() -> None:
    host = host_batch()
    moved = host.to("cuda")
    assert moved.to("cpu") == host
    assert moved != host  # on other devices
    assert ragged.offsets(moved["input_ids"]) is ragged.offsets(moved["response_mask"])


def test_a_batch_moves_while_the_device_works() -> None:
    rows = torch.full((64,), 1 << 14)
    host = DataProto.from_dict({"x": torch.randn(64, 1 << 14), "ids": ragged.ragged(torch.arange(1 << 20), rows)})
    torch.cuda._sleep(1 << 31)
    worked = torch.cuda.Event()
    worked.record()
    moved = host.to("cuda", non_blocking=True)
    assert not worked.query()
    assert moved.to("cpu") == host


def test_offsets_made_by_torch_are_read_once() -> None:
    column = torch.nested.nested_tensor_from_jagged(
        torch.arange(5, device="cuda"), torch.tensor([0, 2, 2, 5], device="cuda")
    )
    batch = DataProto.from_dict({"c": column})
    with no_waiting():
        again = DataProto.from_dict({"c": column + 1, "d": column})
        parts = again.chunk(3)
    assert [ragged.values(part["c"]).tolist() for part in parts] == [[1, 2], [], [3, 4, 5]]
    assert batch["c"] is column


def test_pickle_and_save_from_device(tmp_path: Path, batch: DataProto) -> None:
    assert pickle.loads(pickle.dumps(batch)) == host_batch()
    batch.save_to_disk(tmp_path / "batch")
    assert DataProto.load_from_disk(tmp_path / "batch") == host_batch()


def test_nccl_ranks_agree_and_gather_on_device(batch: DataProto) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        both = batch.union(host_batch().select(["x"], []).rename("x", "on_host"))
        got = all_gather(both)
        assert {name: column.device.type for name, column in got.batch.items() if column.device.type != "cuda"} == {
            "on_host": "cpu"
        }
        assert got.to("cpu") == both.to("cpu")
        parts, indices = prepare_dynamic_batch(batch, 1000, dist.group.WORLD)
        assert len(parts) == len(indices) == 2
        with pytest.raises(ValueError, match="rank 0 of 1: ValueError: row 4 has 900 tokens"):
            prepare_dynamic_batch(batch, 899, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def gather_unequal_rows() -> DataProto:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    part = on_device("cuda")[:3] if rank == 0 else on_device("cuda")[3:]
    got = all_gather(part, group)
    assert {column.device for column in got.batch.values()} == {torch.device("cuda", rank)}
    parts, _ = prepare_dynamic_batch(part, 1000, group, num_batches_divided_by=2)
    assert len(parts) == 2
    with pytest.raises(ValueError, match="rank 1 of 2: ValueError: row 1 has 900 tokens"):
        prepare_dynamic_batch(part, 899, group)
    dist.destroy_process_group(group)
    return got.to("cpu")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_gather_unequal_rows() -> None:
    for got in run_ranks(gather_unequal_rows, 2):
        assert got == host_batch()
