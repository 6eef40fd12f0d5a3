"""Read the tensors of a Hugging Face checkpoint by slices, so a rank reads only the part that it keeps."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
COMPUTED = r"rotary_emb\.inv_freq$"
"""Pattern of tensors in old checkpoints, such as those of Llama 2, that models compute; ignored if unexpected."""


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is damaged or not a checkpoint index; download it again: {error!r}") from error


class SafetensorsFiles:
    """The safetensors files of a folder as one mapping of names to tensors, and a context manager that closes them.

    Opening reads only the headers. The files are memory-mapped, so reading a slice reads only its pages.

    Args:
        folder: folder with `model.safetensors`, or with the index and files of a sharded checkpoint.

    Raises:
        FileNotFoundError: the folder has neither, or lacks a file of the index.
        ValueError: a file or the index is truncated or otherwise damaged, or does not match the index.
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
        where = _weight_map(index) if index.is_file() else {}
        files = sorted(set(where.values()))
        missing = [file for file in files if not (self._folder / file).is_file()]
        if missing == files and (self._folder / _SINGLE).is_file():
            where, files, missing = {}, [_SINGLE], []  # transformers leaves the index of files that it has replaced
        if missing:
            raise FileNotFoundError(
                f"{index} lists {', '.join(missing)}, which the folder lacks; download the missing files"
            )
        if not files:
            raise FileNotFoundError(
                f"expected {_SINGLE} or {_INDEX} in {self._folder}; convert other formats with transformers: "
                "from_pretrained(...).save_pretrained(...)"
            )
        for file in files:
            try:
                self._files[file] = safe_open(self._folder / file, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{self._folder / file} is damaged or not a safetensors file; download it again: {error}"
                ) from error
            self._where |= dict.fromkeys(self._files[file].keys(), file)
        lost = sorted(name for name, file in where.items() if self._where.get(name) != file)
        if lost:
            raise ValueError(
                f"{index} lists {lost[0]} in {where[lost[0]]}, but that file does not contain it; download both again"
            )
        self._shapes = {name: tuple(self._slice(name).get_shape()) for name in self._where}

    def _slice(self, name: str) -> Any:
        return self._files[self._where[name]].get_slice(name)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors by name."""
        return MappingProxyType(self._shapes)

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """Read the part of a tensor in `region` (a slice with bounds per dimension) as a CPU tensor in its own dtype.

        Raises:
            ValueError: the file is damaged.
        """
        try:
            return self._slice(name)[region] if region else self._files[self._where[name]].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"could not read {name} from {self._folder / self._where[name]}: {error}") from error

    def check_tied(self, name: str, alias: str, region: tuple[slice, ...]) -> None:
        """Check that a tied tensor has the same values in `region` under both names, if the checkpoint has both.

        Raises:
            ValueError: it does not; transformers would not tie them.
        """
        if not {name, alias} <= self._shapes.keys():
            return
        is_same = self._shapes[name] == self._shapes[alias]
        if not is_same or bool((self.read(name, region) != self.read(alias, region)).any()):
            raise ValueError(
                f"{alias} and {name} differ in {self._folder}, but its config.json ties them; set tie_word_embeddings "
                f"to false there, or remove {alias}"
            )

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
