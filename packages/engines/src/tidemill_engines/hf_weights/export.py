"""Write weights in Hugging Face format, one shard at a time."""

import fnmatch
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from tidemill_engines.distributed.agreement import raise_on_all_ranks
from tidemill_engines.location import file_system, reported, sizes, written_to

_COPIED = (
    "tokenizer*",
    "*.model",  # of sentencepiece and tiktoken
    "*.tiktoken",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
    "*.py",
)
_UNITS_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
MAX_SHARD_SIZE = "5GB"


def shard_bytes(max_shard_size: int | str) -> int:
    """Parse a size as transformers does: bytes, or a number with KB, MB, GB or TB, which are powers of 1000.

    Raises:
        ValueError: the value is not a size above 0.
    """
    if isinstance(max_shard_size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)", max_shard_size.strip().upper())
        size = 0 if match is None else int(float(match[1]) * _UNITS_BYTES[match[2]])
    else:
        size = max_shard_size
    if size < 1:
        raise ValueError(f"max_shard_size must be bytes >= 1 or a text such as '5GB'; got {max_shard_size!r}")
    return size


def plan_shards(sizes_bytes: Sequence[tuple[str, int]], max_bytes: int) -> list[list[str]]:
    """Divide named tensors, in order, into files of at most `max_bytes`; a larger tensor gets a file of its own."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes_bytes:
        if not shards or size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def shard_file_names(num_shards: int, stem: str = "model") -> list[str]:
    if num_shards == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]


def start_export(path: str, config: PretrainedConfig, dtype: str, origin: Path, group: dist.ProcessGroup) -> None:
    """Create the folder `path` and write all files except the weights, which have `dtype`. Collective.

    Args:
        origin: folder with the tokenizer files.

    Raises:
        OSError: a write failed; raised on every rank.
    """
    with raise_on_all_ranks(group):
        if dist.get_rank(group) == 0:
            with written_to(path) as folder:
                _write_config(config, folder, dtype)
                _copy_side_files(origin, folder)


def write_weights(
    weights: Iterator[tuple[str, torch.Tensor]],
    sizes_bytes: Sequence[tuple[str, int]],
    path: str,
    group: dist.ProcessGroup,
    *,
    max_shard_bytes: int = 5 * 10**9,
    file_stem: str = "model",
) -> None:
    """All-gather the weights and write them as safetensors on the first rank. Collective over `group`.

    Weight files of an earlier export are removed first. The first rank holds full tensors of at most one file; every
    rank holds the tensor that is being gathered, or what `weights` gathers at once.

    Args:
        weights: named weights (DTensors or tensors), the same on all ranks.
        sizes_bytes: names and sizes of the weights; they are divided into files before the first one is gathered.
        max_shard_bytes: maximum size of a file; a larger tensor gets a file of its own.
        file_stem: file name before the number of the file.

    Raises:
        OSError: a write failed; raised on every rank.
    """
    shards = plan_shards(sizes_bytes, max_shard_bytes)
    files = shard_file_names(len(shards), file_stem)
    is_writer = dist.get_rank(group) == 0
    with raise_on_all_ranks(group):
        if is_writer:  # transformers would read the files of an earlier export with another number of files
            present = sizes(path)
            for pattern in (f"{file_stem}.safetensors*", f"{file_stem}-*-of-*.safetensors"):
                for old in fnmatch.filter(present, pattern):
                    with reported(f"remove {path}/{old}"):
                        file_system(path).rm_file(f"{path}/{old}")
    for file, names in zip(files, shards, strict=True):
        held: dict[str, torch.Tensor] = {}
        for name in names:
            gathered_name, weight = next(weights)
            assert gathered_name == name, f"expected {name}, got {gathered_name}"
            full = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if is_writer:
                held[name] = full.cpu().contiguous()
        with raise_on_all_ranks(group):
            if is_writer:
                with written_to(path) as folder:
                    _save(held, folder / file)
    with raise_on_all_ranks(group):
        if is_writer and len(files) > 1:
            where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
            index = {"metadata": {"total_size": sum(size for _, size in sizes_bytes)}, "weight_map": where}
            with written_to(path) as folder:
                (folder / f"{file_stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except OSError:
        raise
    except Exception as error:  # safetensors raises its own class if the disk is full
        raise OSError(f"could not write {file}; check its permissions and free space: {error}") from error


def _write_config(config: PretrainedConfig, path: Path, dtype: str) -> None:
    """Write the configuration of the model, with `dtype` in every section."""
    parts = [getattr(config, name) for name in config.sub_configs]
    for part in (config, *parts):
        if part is not None:
            part.dtype = dtype
    config.save_pretrained(path)


def _copy_side_files(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template, generation config and model code, if `source` has them and is another folder."""
    if source.resolve() == target.resolve():
        return
    for pattern in _COPIED:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
