"""The checksum, compared with its definition in Python integers; checksums of shards add up to that of the tensor."""

import random

import pytest
import torch
from tidemill_weight_update.copy.checksum import CHUNK_ELEMENTS, checksum_rows, has_non_finite, mix32

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8, torch.int64]


def random_tensor(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def checksum(tensor, start, shape):
    """Add up the checksums of the planes of a box that starts at `start` in a tensor of three dims."""
    first, row, col = start
    _, num_rows, num_cols = shape
    planes = [((first + i) * num_rows + row) * num_cols + col for i in range(len(tensor))]
    return sum((checksum_rows(t, pos, num_cols) for t, pos in zip(tensor, planes, strict=True)), torch.tensor(0))


def mix(value):
    value = (value + 0x165667B1) % 2**32
    for factor in (0x9E3779B1, 0x85EBCA77):
        value = value * factor
        value = value % 2**32 ^ value >> 32
    return value


def reference_checksum(tensor):
    """Compute the checksum element by element with Python integers."""
    data = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
    itemsize = min(4, tensor.element_size())
    lanes = 16 // itemsize
    total = 0
    for position in range(len(data) // itemsize):
        bits = int.from_bytes(data[position * itemsize : (position + 1) * itemsize], "little")
        total += bits * (mix(position // lanes) | 1) * (0xC2B2AE3D ** (position % lanes) % 2**32)
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksum_matches_its_definition(dtype):
    tensor = random_tensor((3, 5, 7), dtype)
    assert checksum(tensor, (0, 0, 0), (3, 5, 7)).item() == reference_checksum(tensor)


def test_checksum_of_one_row_of_one_element_and_of_none():
    assert checksum_rows(torch.tensor([[1.5]]), 0, 0).item() == reference_checksum(torch.tensor(1.5))
    assert checksum_rows(torch.arange(9)[None], 0, 0).item() == reference_checksum(torch.arange(9))
    for shape in ((0, 4), (4, 0), (0, 0)):
        assert checksum_rows(torch.empty(shape), 0, 4).item() == 0


def test_mix32_matches_its_definition_and_reads_32_bits():
    sample = torch.arange(0, 2**32, 2**22 + 1)
    assert [mix(value) for value in sample.tolist()] == mix32(sample).tolist()
    assert torch.equal(mix32(sample + 2**32), mix32(sample))


def test_mix32_scatters_neighboring_positions():
    n = 1 << 18
    numbers = torch.arange(n)
    mixed = mix32(numbers)
    # Among n random 32-bit numbers about n * n / 2**33 = 8 pairs are equal.
    assert n - mixed.unique().numel() < 30
    for bit in range(18):
        flipped = mixed ^ mix32(numbers ^ (1 << bit))
        for out in range(32):
            assert abs(((flipped >> out) & 1).double().mean().item() - 0.5) < 0.01
    centred = mixed.double() / 2**32 - 0.5
    for step in (1, 2, 64, 1000, 1024):
        assert abs((centred[step:] * centred[:-step]).mean().item()) < 0.01 / 12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksums_of_shards_add_up_to_the_whole(dtype):
    shape = (6, 11, 9)
    tensor = random_tensor(shape, dtype, seed=1)
    whole = checksum(tensor, (0, 0, 0), shape)
    rng = random.Random(0)
    for _ in range(5):
        boxes = [((0, 0, 0), tensor)]
        for _ in range(12):
            start, part = boxes.pop(rng.randrange(len(boxes)))
            dim = rng.randrange(3)
            cut = rng.randint(0, part.shape[dim])
            moved = tuple(first + cut * (d == dim) for d, first in enumerate(start))
            boxes += [(start, part.narrow(dim, 0, cut)), (moved, part.narrow(dim, cut, part.shape[dim] - cut))]
        assert sum(checksum(part, start, shape) for start, part in boxes) == whole


def test_checksum_is_independent_of_strides():
    tensor = random_tensor((40, 30), torch.bfloat16)
    assert checksum_rows(tensor.t().contiguous().t(), 0, 30) == checksum_rows(tensor, 0, 30)


@pytest.mark.parametrize("shape", [(1, CHUNK_ELEMENTS * 2 + 5), (3, CHUNK_ELEMENTS // 2 + 3), (CHUNK_ELEMENTS, 7)])
def test_large_tensors_are_checksummed_in_chunks(shape):
    tensor = random_tensor(shape, torch.bfloat16)
    flat, middle = tensor.flatten(), tensor.numel() // 2 + 1
    halves = [checksum_rows(flat[:middle].view(1, -1), 0, 0), checksum_rows(flat[middle:].view(1, -1), middle, 0)]
    assert checksum_rows(tensor, 0, shape[1]) == sum(halves)
    tensor.view(torch.int16).flatten()[-1] += 1
    assert checksum_rows(tensor, 0, shape[1]) != sum(halves)


def test_one_changed_moved_or_lost_element_changes_the_checksum():
    tensor = random_tensor((64, 33), torch.bfloat16, seed=3)
    whole = checksum_rows(tensor, 0, 33).item()
    changed = []
    for at in range(0, tensor.numel(), 7):
        for edit in ("flip", "swap", "zero"):
            bits = tensor.clone().view(torch.int16).flatten()
            if edit == "flip":
                bits[at] ^= 1 << at % 16
            elif edit == "swap":
                bits[[at, at - 1]] = bits[[at - 1, at]]
            else:
                bits[at] = 0
            same = torch.equal(bits, tensor.view(torch.int16).flatten())
            changed.append(same or checksum_rows(bits.view(64, 33), 0, 33).item() != whole)
    assert all(changed)


def test_checksum_factors_repeat_after_64_gib_and_not_before():
    row = random_tensor((1, 50), torch.bfloat16)
    far = checksum_rows(row, 2**35 + 6, 0)
    assert far == checksum_rows(row, 6, 0)  # the factors repeat after 64 GiB
    assert far != checksum_rows(row, 2**34 + 6, 0)
    assert checksum_rows(row, 2**40 + 7, 0) == checksum_rows(row[:, :13], 2**40 + 7, 0) + checksum_rows(
        row[:, 13:], 20, 0
    )


def test_unsupported_element_size_is_refused():
    with pytest.raises(TypeError, match=r"1, 2, 4 or 8 bytes, got torch\.complex128"):
        checksum_rows(torch.zeros(1, 2, dtype=torch.complex128), 0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_one_non_finite_element_is_found(dtype):
    tensor = torch.randn(3, CHUNK_ELEMENTS // 2).to(dtype)
    assert not has_non_finite(tensor)
    for at, bad in (((0, 0), "nan"), ((1, 5), "inf"), ((2, -1), "-inf")):
        changed = tensor.clone()
        changed[at] = float(bad)
        assert has_non_finite(changed)
        assert has_non_finite(changed.t()[at[1] :])
    assert not has_non_finite(changed.t()[5:6])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64], ids=str
)
def test_a_non_finite_element_is_found_at_each_position(dtype):
    for bad in (float("nan"), float("inf"), -float("inf")):
        changed = torch.zeros(67, 2, 67, dtype=dtype)
        changed[range(67), 1, range(67)] = bad
        assert all(has_non_finite(rows) for rows in changed)
        assert all(has_non_finite(rows.t()) for rows in changed)
        assert not any(has_non_finite(rows[:1]) for rows in changed)


def test_non_finite_elements_of_float8_and_of_integers():
    assert has_non_finite(torch.tensor([[1.0, float("nan"), 448.0]]).to(torch.float8_e4m3fn))
    assert has_non_finite(torch.tensor([[float("inf"), 4.0]]).to(torch.float8_e5m2))
    assert not has_non_finite(torch.tensor([[1.0, 448.0]]).to(torch.float8_e4m3fn))
    assert not has_non_finite(torch.full((1, 4), -1))
