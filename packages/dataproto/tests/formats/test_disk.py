"""Files: exact, atomic, versioned, and without pickles unless they are allowed."""

import errno
import os
import pickle
import stat
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from tidemill_dataproto import DataProto, pad_dataproto_to_divisor, ragged
from tidemill_dataproto.columns.equality import same
from tidemill_dataproto.formats import disk
from tidemill_dataproto.formats.objects import Decoder, Encoder

NAN = float("nan")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)
OBJECTS = [
    np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2],
    np.array(["a", "long"]),
    np.array([None, [1], (2,)], dtype=object),
    np.array(["2026-01-01"], dtype="datetime64[D]"),
    np.float32(1.5),
    np.bool_(True),
    np.array([b"ab"]),
    np.array(3.0),
    np.arange(3, dtype=">i4"),
    torch.arange(6).reshape(2, 3).t(),
    torch.tensor(NAN, dtype=torch.bfloat16),
    torch.zeros(0, 2),
    torch.tensor([1 + 2j]).conj(),
    {"pixel_values": torch.ones(2, 2), "sizes": [(1, 2)]},
]


def make() -> DataProto:
    ids = ragged.ragged(torch.arange(5), [2, 0, 3])
    tensors = {"ids": ids, "mask": ragged.like(torch.ones(5), ids), "x": torch.randn(3, 2)}
    return DataProto.from_dict(tensors, {"uid": ["a", "b", "c"]}, {"step": 1})


@given(st.lists(JSON, min_size=1, max_size=3))
def test_plain_objects_round_trip(tmp_path_factory: pytest.TempPathFactory, objects: list[Any]) -> None:
    path = tmp_path_factory.mktemp("plain") / "batch"
    batch = DataProto.from_dict({}, {"objects": objects}, {"key": objects})
    batch.save_to_disk(path)
    assert DataProto.load_from_disk(path) == batch


@pytest.mark.parametrize("number", range(len(OBJECTS)))
def test_arrays_and_tensors_in_objects_round_trip(number: int, tmp_path: Path) -> None:
    value = OBJECTS[number]
    batch = DataProto.from_dict({}, {"objects": [value, [value], None]}, {"key": value})
    batch.save_to_disk(tmp_path / "batch")
    loaded = DataProto.load_from_disk(tmp_path / "batch")
    big_endian = isinstance(value, np.ndarray) and value.dtype.byteorder == ">"
    assert same(loaded["objects"][0], value.astype("i4") if big_endian else value)  # of native byte order
    assert same(loaded["objects"][1][0], loaded["objects"][0])
    assert same(loaded.meta_info["key"], loaded["objects"][0])
    assert type(loaded["objects"][0]) is type(value)


def test_ragged_tensors_in_objects_round_trip(tmp_path: Path) -> None:
    column = make()["ids"]
    batch = DataProto.from_dict({}, {"objects": [{"column": column}]})
    batch.save_to_disk(tmp_path / "batch")
    assert same(DataProto.load_from_disk(tmp_path / "batch")["objects"][0]["column"], column)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.float64, np.complex64, "U3", "S2", "datetime64[s]", bool])
def test_numpy_columns_of_every_dtype_round_trip(dtype: Any, tmp_path: Path) -> None:
    column = np.arange(6).reshape(3, 2).astype(dtype)
    batch = DataProto.from_dict({}, {"c": column})
    batch.save_to_disk(tmp_path / "batch")
    loaded = DataProto.load_from_disk(tmp_path / "batch")
    assert loaded == batch
    assert loaded["c"].dtype == column.dtype
    loaded["c"][0] = loaded["c"][1]  # not read-only
    DataProto.from_dict({}, {"c": column[:0][::-1]}).save_to_disk(tmp_path / "none")
    assert DataProto.load_from_disk(tmp_path / "none")["c"].shape == (0, 2)


def test_loaded_columns_share_layouts_and_are_writable(tmp_path: Path) -> None:
    make().save_to_disk(tmp_path / "batch")
    loaded = DataProto.load_from_disk(tmp_path / "batch")
    assert ragged.offsets(loaded["ids"]) is ragged.offsets(loaded["mask"])
    assert (loaded["ids"] * loaded["mask"]).values().tolist() == [0, 1, 2, 3, 4]
    loaded["x"].zero_()
    ragged.values(loaded["ids"]).zero_()
    assert DataProto.load_from_disk(tmp_path / "batch")["ids"].values().tolist() == [0, 1, 2, 3, 4]


def test_padding_shared_memory_and_gradients_can_be_saved(tmp_path: Path) -> None:
    x = torch.arange(6.0)
    batch = DataProto.from_dict({"a": x, "b": x, "c": x[::2].repeat(2), "d": x.clone().requires_grad_()})
    padded, size = pad_dataproto_to_divisor(batch, 4)
    padded.save_to_disk(tmp_path / "batch")
    loaded = DataProto.load_from_disk(tmp_path / "batch")
    assert loaded.is_padding.tolist() == [False] * 6 + [True] * size
    assert loaded == padded
    batch.save_to_disk(tmp_path / "batch")
    assert DataProto.load_from_disk(tmp_path / "batch") == batch


def test_safetensors_reads_the_tensors(tmp_path: Path) -> None:
    make().save_to_disk(tmp_path / "batch")
    with safe_open(tmp_path / "batch", "np") as file:
        assert file.metadata() == {"format": "tidemill-dataproto", "version": "1"}
        assert file.get_tensor("batch/ids").tolist() == [0, 1, 2, 3, 4]
        assert file.get_tensor("bounds/0").tolist() == [0, 2, 2, 5]


def test_ragged_columns_with_strided_offsets_can_be_saved(tmp_path: Path) -> None:
    folded = DataProto.from_dict({"ids": ragged.ragged(torch.arange(9), [2, 0, 3, 4])}, {"uid": list("abcd")}).fold(2)
    assert ragged.offsets(folded["ids"]).is_contiguous()
    given = DataProto.from_dict({"ids": ragged.ragged(torch.arange(5), offsets=torch.tensor([0, 9, 2, 9, 5])[::2])})
    for batch in (folded, given):
        batch.save_to_disk(tmp_path / "batch")
        assert DataProto.load_from_disk(tmp_path / "batch") == batch


def test_decoder_reads_the_tensors_of_its_encoder() -> None:
    encoder = Encoder(allow_pickle=False)
    value = {"a": torch.arange(3), "b": [b"bytes", np.float32(1.5)]}
    encoded = encoder.encode(value, "a value")
    assert same(Decoder(False, encoder.tensors.__getitem__).decode(encoded), value)


class Runs:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_loading_runs_no_code_unless_allowed(tmp_path: Path) -> None:
    left = tmp_path / "code_ran"
    batch = DataProto.from_dict({}, {"o": [1, Runs(left)]}, {"key": Fraction(1, 2)})
    with pytest.raises(TypeError, match=r"column 'o', row 1 is a .*Runs, .* allow_pickle=True here and to load"):
        batch.save_to_disk(tmp_path / "batch")
    with pytest.raises(TypeError, match=r"meta_info\['key'\] is a fractions.Fraction"):
        batch.select([], []).save_to_disk(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []
    batch.save_to_disk(tmp_path / "batch", allow_pickle=True)
    with pytest.raises(ValueError, match="pickled objects, and loading them runs code; pass allow_pickle=True"):
        DataProto.load_from_disk(tmp_path / "batch")
    assert not left.exists()
    assert DataProto.load_from_disk(tmp_path / "batch", allow_pickle=True).meta_info == {"key": Fraction(1, 2)}
    assert left.exists()
    (tmp_path / "pickle").write_bytes(pickle.dumps(Runs(tmp_path / "never")))
    with pytest.raises(ValueError, match="truncated, damaged or not a safetensors file"):
        DataProto.load_from_disk(tmp_path / "pickle")
    assert not (tmp_path / "never").exists()


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    make().save_to_disk(tmp_path / "batch")
    data = (tmp_path / "batch").read_bytes()
    for size in [*range(0, len(data), 101), len(data) - 1]:
        (tmp_path / "cut").write_bytes(data[:size])
        with pytest.raises(ValueError, match="cut is truncated, damaged"):
            DataProto.load_from_disk(tmp_path / "cut")


def test_files_of_other_formats_and_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"file cannot be loaded: expected a file of DataProto.save_to_disk, got"):
        DataProto.load_from_disk(path)
    save_file({"x": torch.zeros(2)}, path, metadata={"format": "tidemill-dataproto", "version": "2"})
    with pytest.raises(ValueError, match="expected format version 1 or lower, got 2"):
        DataProto.load_from_disk(path)
    save_file({"x": torch.zeros(2)}, path, metadata={"format": "tidemill-dataproto", "version": "1"})
    with pytest.raises(ValueError, match="does not contain tensor json"):
        DataProto.load_from_disk(path)
    with pytest.raises(FileNotFoundError):
        DataProto.load_from_disk(tmp_path / "none")
    with pytest.raises(IsADirectoryError, match=f"but {tmp_path} is a folder"):
        DataProto.load_from_disk(tmp_path)
    with pytest.raises(FileNotFoundError, match="none does not exist; create it"):
        make().save_to_disk(tmp_path / "none" / "batch")


def test_files_with_inconsistent_columns_are_refused(tmp_path: Path) -> None:
    make().save_to_disk(tmp_path / "batch")
    with safe_open(tmp_path / "batch", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        metadata = file.metadata()
    for name, wrong in (("bounds/0", torch.tensor([0, 2, 1, 5])), ("bounds/0", torch.tensor([0, 5])),
                        ("batch/x", torch.zeros(2, 2)), ("batch/ids", torch.zeros(4))):  # fmt: skip
        save_file(tensors | {name: wrong}, tmp_path / "wrong", metadata=metadata)
        with pytest.raises(ValueError, match="does not have the 3 rows"):
            DataProto.load_from_disk(tmp_path / "wrong")


def test_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "batch"
    make().save_to_disk(path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        DataProto.from_dict({}, {"o": [object()]}).save_to_disk(path)
    with pytest.raises(TypeError, match=r"batch/x is torch.complex128, which safetensors cannot store"):
        DataProto.from_dict({"x": torch.zeros(1, dtype=torch.complex128)}).save_to_disk(path)

    def no_space(_path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "_flush", no_space)
    with pytest.raises(OSError, match="No space"):
        DataProto.from_dict({"x": torch.zeros(1)}).save_to_disk(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["batch"]


def test_saves_where_folders_cannot_be_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush = os.fsync

    def of_network(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", of_network)
    batch = DataProto.from_dict({"x": torch.arange(3)})
    batch.save_to_disk(tmp_path / "batch")
    assert DataProto.load_from_disk(tmp_path / "batch") == batch
