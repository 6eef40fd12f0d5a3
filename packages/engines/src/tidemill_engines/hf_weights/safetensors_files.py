"""The tensors of a Hugging Face checkpoint, read by slices, so that a rank touches only what it keeps."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is damaged or not the index of a checkpoint: {error!r}") from error


class SafetensorsFiles:
    """The safetensors files of a folder as one mapping of names to tensors; a context that closes them.

    Opening reads the headers only. The files are mapped into memory, so a slice costs the pages that it lies on.

    Args:
        folder: with `model.safetensors`, or with the index of a sharded checkpoint and its files.

    Raises:
        FileNotFoundError: neither is there, or a file of the index is not.
        ValueError: a file or the index is cut off or otherwise damaged, or does not hold what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        self._folder = folder
        try:
            self._open_all()
        except BaseException:
            self.close()
            raise

    def _open_all(self) -> None:
        index = self._folder / _INDEX
        if index.is_file():
            where = _weight_map(index)
            missing = sorted({file for file in where.values() if not (self._folder / file).is_file()})
            if missing:
                raise FileNotFoundError(f"{index} names {', '.join(missing)}, not found beside it; download the rest")
        elif (self._folder / _SINGLE).is_file():
            where = {}
        else:
            raise FileNotFoundError(
                f"expected {_SINGLE} or {_INDEX} in {self._folder}; other formats are not read, convert them with "
                "transformers: from_pretrained(...).save_pretrained(...)"
            )
        for file in sorted(set(where.values())) or [_SINGLE]:
            try:
                self._files[file] = safe_open(self._folder / file, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self._folder / file} is damaged or not a safetensors file: {error}") from error
            self._where |= dict.fromkeys(self._files[file].keys(), file)
        lost = sorted(name for name, file in where.items() if self._where.get(name) != file)
        if lost:
            raise ValueError(f"{index} says that {lost[0]} is in {where[lost[0]]}, but that file does not hold it")
        self._shapes = {name: tuple(self._slice(name).get_shape()) for name in self._where}

    def _slice(self, name: str) -> Any:
        return self._files[self._where[name]].get_slice(name)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor by name, as the headers say."""
        return MappingProxyType(self._shapes)

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """The part of a tensor within `region` (a slice with bounds per dimension), a CPU tensor in the file's dtype.

        Raises:
            ValueError: the file is damaged there.
        """
        try:
            return self._slice(name)[region] if region else self._files[self._where[name]].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"could not read {name} from {self._folder / self._where[name]}: {error}") from error

    def close(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            file.__exit__(None, None, None)

    def __enter__(self) -> "SafetensorsFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
