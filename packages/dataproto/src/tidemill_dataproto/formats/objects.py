"""Encode Python objects as JSON and tensors, and decode them; runs no code from a file unless pickle is allowed."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill_dataproto import ragged
from tidemill_dataproto.columns.numpy_columns import object_column

__all__ = ["Decoder", "Encoder", "storable"]

_PLAIN = (type(None), bool, int, str)
_RAW_KINDS = "USMm"  # strings and times: stored as bytes, since torch has no such dtypes


def storable(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor, contiguous, on the CPU, without gradient."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


@dataclass(slots=True)
class Encoder:
    """Encodes objects and collects the tensors in them.

    Attributes:
        allow_pickle: whether objects without a JSON form are pickled.
        tensors: collected tensors by name, contiguous, on the CPU.
    """

    allow_pickle: bool
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def encode(self, value: Any, where: str) -> Any:
        """Return `value` as JSON: plain data unchanged, everything else as {"$kind": ...}.

        Raises:
            TypeError: an object of another type, without `allow_pickle`; the error contains `where`.
        """
        kind: type = type(value)
        if kind in _PLAIN:
            return value
        if kind is float:
            return value if np.isfinite(value) else {"$float": repr(value)}
        if kind is list:
            return [self.encode(item, where) for item in value]
        if kind is tuple:
            return {"$tuple": [self.encode(item, where) for item in value]}
        if kind is dict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.encode(item, where) for key, item in value.items()}
            return {"$dict": [[self.encode(key, where), self.encode(item, where)] for key, item in value.items()]}
        if kind is bytes:
            return {"$bytes": self.add_bytes(value)}
        if isinstance(value, Tensor) and ragged.is_ragged(value):
            return {"$ragged": [self.add(ragged.values(value)), self.add(ragged.host_lengths(value))]}
        if kind is Tensor and value.layout == torch.strided:
            return {"$tensor": self.add(value)}
        if kind is np.ndarray or issubclass(kind, np.generic):
            array = np.asarray(value)
            if array.dtype.kind in "biufcO" + _RAW_KINDS:
                return {"$array" if kind is np.ndarray else "$scalar": self.encode_array(array, where)}
        if self.allow_pickle:
            return {"$pickle": self.add_bytes(pickle.dumps(value, protocol=5))}
        raise TypeError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which is neither JSON, tuple, bytes, array nor "
            f"tensor; drop or convert it, or pass allow_pickle=True here and to load_from_disk()"
        )

    def encode_array(self, array: np.ndarray, where: str) -> Any:
        """Return a numpy array as JSON; TypeError for a dtype without a portable form."""
        shape = list(array.shape)
        if array.dtype == object:
            rows = [self.encode(item, f"{where}, row {row}") for row, item in enumerate(array.ravel())]
            return {"dtype": "object", "shape": shape, "rows": rows}
        if array.dtype.kind in _RAW_KINDS:
            return {"dtype": array.dtype.str, "shape": shape, "bytes": self.add_bytes(array.tobytes())}
        if array.dtype.kind not in "biufc":
            raise TypeError(f"{where} is an array of {array.dtype}, which cannot be saved; convert it")
        native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        # An empty array may keep negative strides, which torch refuses.
        tensor = torch.from_numpy(native if native.flags.writeable and native.size else native.copy())
        return {"dtype": native.dtype.str, "shape": shape, "tensor": self.add(tensor.reshape(array.shape))}

    def add(self, tensor: Tensor) -> str:
        """Add a tensor; return its name."""
        name = f"object/{len(self.tensors)}"
        self.tensors[name] = storable(tensor)
        return name

    def add_bytes(self, data: bytes) -> str:
        """Add bytes as a tensor; return its name."""
        return self.add(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte())


@dataclass(slots=True)
class Decoder:
    """Decodes objects that an `Encoder` encoded.

    Attributes:
        allow_pickle: whether pickled objects are loaded, which runs code chosen by the author of the file.
        tensors: returns the tensor of a name, from a file or `encoder.tensors.__getitem__`.
    """

    allow_pickle: bool
    tensors: Callable[[str], Tensor]

    def decode(self, value: Any) -> Any:
        """Decode JSON. ValueError for pickled objects without `allow_pickle`, or an unknown kind."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next((key for key in value if key.startswith("$")), None)
        if tag is None:
            return {key: self.decode(item) for key, item in value.items()}
        return self._decode_tagged(tag, value[tag])

    def decode_array(self, value: dict[str, Any]) -> np.ndarray:
        """Decode a numpy array."""
        shape: Sequence[int] = value["shape"]
        if value["dtype"] == "object":
            return object_column([self.decode(row) for row in value["rows"]]).reshape(shape)
        if "bytes" in value:
            return np.frombuffer(bytearray(self._bytes(value["bytes"])), dtype=value["dtype"]).reshape(shape)
        return self.tensors(value["tensor"]).numpy().reshape(shape)

    def _decode_tagged(self, tag: str, data: Any) -> Any:
        if tag == "$float":
            return float(data)
        if tag == "$tuple":
            return tuple(self.decode(item) for item in data)
        if tag == "$dict":
            return {self.decode(key): self.decode(item) for key, item in data}
        if tag == "$bytes":
            return self._bytes(data)
        if tag == "$tensor":
            return self.tensors(data)
        if tag == "$ragged":
            return ragged.ragged(self.tensors(data[0]), self.tensors(data[1]))
        if tag == "$array":
            return self.decode_array(data)
        if tag == "$scalar":
            return self.decode_array(data)[()]
        if tag != "$pickle":
            raise ValueError(f"it contains an object of the unknown kind {tag!r}; update tidemill-dataproto")
        if not self.allow_pickle:
            raise ValueError(
                "it contains pickled objects, and loading them runs code; pass allow_pickle=True if you trust the file"
            )
        return pickle.loads(self._bytes(data))

    def _bytes(self, name: str) -> bytes:
        return self.tensors(name).numpy().tobytes()
