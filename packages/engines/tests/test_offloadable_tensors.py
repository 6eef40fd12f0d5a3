"""Sets of tensors that are offloaded and onloaded."""

import resource
from pathlib import Path

import pytest
import torch
from tidemill_engines.offload import OffloadableTensors, Offloader
from tidemill_testing import run_ranks


def test_offload_frees_memory_and_keeps_tensor_objects():
    whole = torch.arange(10.0)
    tensors = [whole[2:6], whole[6:], torch.ones(3, dtype=torch.int64), torch.zeros(0)]
    expected = [tensor.clone() for tensor in tensors]
    offloaded = OffloadableTensors(lambda: tensors)
    for _ in range(2):
        offloaded.offload()
        offloaded.offload()
        assert offloaded.is_offloaded
        assert whole.untyped_storage().size() == tensors[2].untyped_storage().size() == 0
        assert [offloaded.read(tensor).tolist() for tensor in tensors] == [tensor.tolist() for tensor in expected]
        offloaded.onload()
        offloaded.onload()
        assert not offloaded.is_offloaded
        assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, expected, strict=True))
        assert offloaded.read(tensors[0]).untyped_storage()._cdata != whole.untyped_storage()._cdata
    offloaded.offload()
    tensors[:] = [torch.full((2,), 7.0)]  # new tensors while the old ones are offloaded
    offloaded.replace()
    assert offloaded.is_offloaded
    assert tensors[0].untyped_storage().size() == 0
    offloaded.onload()
    assert tensors[0].tolist() == [7.0, 7.0]


@pytest.mark.parametrize("num_bytes", [1, (1 << 20) - 1, 3 << 20, (128 << 20) + (5 << 20) + 7])
def test_copy_on_the_cpu_is_made_of_powers_of_two_and_a_rest_below_a_mib(num_bytes):
    tensor = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
    expected = tensor.clone()
    offloaded = OffloadableTensors(lambda: [tensor])
    offloaded.offload()
    [(_, parts, _)] = offloaded._copies.values()
    assert sum(map(len, parts)) == num_bytes
    assert all(len(part).bit_count() == 1 for part in parts if len(part) >= 1 << 20)
    assert sum(len(part) for part in parts if len(part) < 1 << 20) < 1 << 20
    assert torch.equal(offloaded.read(tensor), expected)
    offloaded.onload()
    assert torch.equal(tensor, expected)


def test_copies_share_blocks(monkeypatch):
    monkeypatch.setattr("tidemill_engines.offload._LARGEST", 4 << 20)
    sizes = [1, 3 << 20, (5 << 20) + 9, 0, 7, (1 << 20) + 1]
    tensors = [torch.arange(size, dtype=torch.int64).to(torch.uint8) for size in sizes]
    expected = [tensor.clone() for tensor in tensors]
    offloaded = OffloadableTensors(lambda: tensors)
    offloaded.offload()
    parts = [part for _, copy, _ in offloaded._copies.values() for part in copy]
    blocks = {part.untyped_storage().data_ptr(): part.untyped_storage().size() for part in parts}
    assert sorted(blocks.values()) == [sum(sizes) - (9 << 20), 1 << 20, 4 << 20, 4 << 20]
    assert len(parts) == len([size for size in sizes if size]) + len(blocks) - 1
    for tensor, values in zip(tensors, expected, strict=True):
        assert torch.equal(offloaded.read(tensor), values)
    offloaded.onload()
    assert all(torch.equal(tensor, values) for tensor, values in zip(tensors, expected, strict=True))


def test_a_part_of_a_storage_is_read_alone():
    whole = torch.arange((3 << 20) + 1000, dtype=torch.int16)  # copied in parts of 4 and 2 MiB, and a rest
    middle = (2 << 20) - 5  # of the end of the first part, in elements
    tensors = [whole, whole[middle : middle + 12], whole[middle : middle + 12].view(3, 4).t(), whole[-7:], whole[:0]]
    expected = [tensor.clone() for tensor in tensors]
    offloaded = OffloadableTensors(lambda: tensors)
    offloaded.offload()
    for tensor, values in zip(tensors[1:], expected[1:], strict=True):
        read = offloaded.read(tensor)
        assert torch.equal(read, values)
        assert read.untyped_storage().size() == values.untyped_storage().size()


def run_without_memory():
    """Return storage sizes after a failed onload, and whether a later onload restores the values."""
    params, state = torch.arange(1 << 20), torch.arange(1 << 26)
    offloader = Offloader(
        {
            "params": OffloadableTensors(lambda: [params]),
            "optimizer": OffloadableTensors(lambda: [torch.arange(4), state]),
        }
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (128 << 20), hard))
    try:
        with pytest.raises(RuntimeError, match="memory"), offloader.onloaded("params", "optimizer"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    sizes = [tensor.untyped_storage().size() for tensor in (params, state)]
    with offloader.onloaded("params", "optimizer"):
        same = torch.equal(params, torch.arange(1 << 20)) and torch.equal(state, torch.arange(1 << 26))
    return sizes, same, [tensor.untyped_storage().size() for tensor in (params, state)]


def test_failed_onload_leaves_all_tensors_offloaded():
    assert run_ranks(run_without_memory, 1) == [([0, 0], True, [0, 0])]


def test_overlapping_onloaded_contexts_offload_at_last_exit():
    tensor = torch.arange(4.0)
    offloader = Offloader({"params": OffloadableTensors(lambda: [tensor])})

    def weights():
        with offloader.onloaded("params"):
            yield tensor

    iterator = weights()
    next(iterator)
    with offloader.onloaded("params", "optimizer"):
        iterator.close()
        offloader.check_onloaded("params")
        assert tensor.tolist() == [0, 1, 2, 3]
        iterator = weights()
        next(iterator)
    offloader.check_onloaded("params")
    assert tensor.tolist() == [0, 1, 2, 3]
    iterator.close()
    with pytest.raises(RuntimeError, match="params: offloaded"):
        offloader.check_onloaded("params")
    assert tensor.untyped_storage().size() == 0


def test_tensors_that_are_offloaded_later_stay_on_the_device_after_they_were_onloaded():
    tensors = {"params": torch.arange(4.0), "grads": torch.ones(2)}
    offloader = Offloader(
        {kind: OffloadableTensors(lambda tensor=tensor: [tensor]) for kind, tensor in tensors.items()}
    )
    with offloader.offloaded_later("params", "optimizer"):
        assert [tensor.untyped_storage().size() for tensor in tensors.values()] == [0, 0]
        with offloader.onloaded("params", "grads"):
            tensors["params"].add_(1)
        assert tensors["params"].tolist() == [1, 2, 3, 4]
        assert tensors["grads"].untyped_storage().size() == 0
    assert tensors["params"].untyped_storage().size() == 0
    with offloader.onloaded("params"):
        assert tensors["params"].tolist() == [1, 2, 3, 4]
