"""Save a batch as one safetensors file: tensors, and everything else as JSON in one of them.

Format version 1. The metadata of the file are {"format": "tidemill-dataproto", "version": "1"}. Its tensors are
"batch/<name>" (a dense column, or the values of a ragged one), "bounds/<number>" (int64 [B + 1], of ragged columns that
share a layout), "object/<number>" (from numpy columns, objects and meta_info) and "json" (uint8, the text that
describes the structure).
"""

import errno
import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from tidemill_dataproto.columns.tensor_columns import Column, num_rows_of
from tidemill_dataproto.formats.objects import Decoder, Encoder, storable
from tidemill_dataproto.ragged.layout import JaggedColumn, Layout

__all__ = ["read", "write"]

_FORMAT, _VERSION = "tidemill-dataproto", 1
_Contents = tuple[int, dict[str, Column], dict[str, np.ndarray], dict[str, Any], np.ndarray | None]


def write(
    path: Path,
    num_rows: int,
    columns: Mapping[str, Column],
    arrays: Mapping[str, np.ndarray],
    meta_info: Mapping[str, Any],
    padding: np.ndarray | None,
    allow_pickle: bool,
) -> None:
    """Write a batch; see `DataProto.save_to_disk`."""
    encoder = Encoder(allow_pickle)
    tensors: dict[str, Tensor] = {}
    layouts: dict[int, int] = {}
    for name, column in columns.items():
        if isinstance(column, JaggedColumn):
            number = layouts.setdefault(column.layout.key, len(layouts))
            tensors[f"bounds/{number}"] = storable(torch.from_numpy(column.layout.bounds))
        tensors[f"batch/{name}"] = storable(column.values if isinstance(column, JaggedColumn) else column)
    manifest = {
        "num_rows": num_rows,
        "columns": {
            name: layouts[column.layout.key] if isinstance(column, JaggedColumn) else None
            for name, column in columns.items()
        },
        "arrays": {name: encoder.encode_array(array, f"column {name!r}") for name, array in arrays.items()},
        "meta_info": [
            [encoder.encode(key, "a key of meta_info"), encoder.encode(value, f"meta_info[{key!r}]")]
            for key, value in meta_info.items()
        ],
        "padding": None if padding is None else encoder.encode_array(padding, "padding"),
    }
    text = json.dumps(manifest, allow_nan=False).encode()
    tensors |= encoder.tensors | {"json": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    _check_dtypes(tensors)
    _write_file(path, tensors)


def read(path: Path, allow_pickle: bool) -> _Contents:
    """Return number of rows, tensor and numpy columns, meta_info and padding; see `DataProto.load_from_disk`."""
    if path.is_dir():  # the error of safetensors is "No such device"
        raise IsADirectoryError(f"expected a file of DataProto.save_to_disk, but {path} is a folder")
    try:
        with safe_open(path, framework="pt") as file:
            _check_version(path, file.metadata())
            return _decode(file.get_tensor, allow_pickle)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated, damaged or not a safetensors file ({error}); save the batch again"
        ) from error
    except (ValueError, LookupError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error


def _decode(get_tensor: Callable[[str], Tensor], allow_pickle: bool) -> _Contents:
    decoder = Decoder(allow_pickle, get_tensor)
    manifest = json.loads(get_tensor("json").numpy().tobytes())
    num_rows: int = manifest["num_rows"]
    layouts: dict[int, Layout] = {}
    columns: dict[str, Column] = {}
    for name, number in manifest["columns"].items():
        values = get_tensor(f"batch/{name}")
        if number is not None and number not in layouts:
            layouts[number] = Layout(get_tensor(f"bounds/{number}").numpy(), values.device)
        columns[name] = values if number is None else JaggedColumn(values, layouts[number])
        if num_rows_of(columns[name]) != num_rows or (number is not None and not layouts[number].fits(len(values))):
            raise ValueError(
                f"column {name!r} does not have the {num_rows} rows of the batch; the file is damaged, save the batch "
                f"again"
            )
    arrays = {name: decoder.decode_array(array) for name, array in manifest["arrays"].items()}
    meta_info = {decoder.decode(key): decoder.decode(value) for key, value in manifest["meta_info"]}
    padding = None if manifest["padding"] is None else decoder.decode_array(manifest["padding"])
    return num_rows, columns, arrays, meta_info, padding


def _check_version(path: Path, metadata: Mapping[str, str] | None) -> None:
    found = {} if metadata is None else metadata
    if found.get("format") != _FORMAT:
        raise ValueError(f"expected a file of DataProto.save_to_disk, got a safetensors file with metadata {found}")
    if not found["version"].isdecimal() or int(found["version"]) > _VERSION:
        raise ValueError(
            f"expected format version {_VERSION} or lower, got {found['version']}; update tidemill-dataproto"
        )


def _check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    checked: set[torch.dtype] = set()
    for name, tensor in tensors.items():
        if tensor.dtype not in checked:
            try:
                save({"x": tensor.new_empty(0)})
            except KeyError as error:
                raise TypeError(f"{name} is {tensor.dtype}, which safetensors cannot store; convert it") from error
            checked.add(tensor.dtype)


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a temporary file in the same folder and rename it to `path` when it is complete."""
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"expected an existing folder for {path.name}, but {path.parent} does not exist; create it"
        )
    storages: set[int] = set()
    for name, tensor in tensors.items():  # safetensors refuses tensors that overlap
        pointer = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if pointer in storages else tensor
        storages.add(pointer)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(tensors, beside, metadata={"format": _FORMAT, "version": str(_VERSION)})
        _flush(beside)
        os.replace(beside, path)
        _flush(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Wait until the file, or the entries of the folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network filesystems do not support fsync of folders, and need none
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
