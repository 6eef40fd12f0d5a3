"""Weights of Megatron's model under Hugging Face names: loaded from safetensors, exported as shards or whole."""

import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from tidemill_engines.distributed.agreement import all_gather, raise_on_all_ranks
from tidemill_engines.hf_weights.safetensors_files import COMPUTED, SafetensorsFiles
from tidemill_engines.hf_weights.shard import WeightShard
from tidemill_engines.megatron.architecture import Architecture
from tidemill_engines.megatron.weights.names import blocks_of
from tidemill_engines.megatron.weights.placement import Block, Placement

_HEAD, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"

_Key = tuple[str, tuple[int, ...]]
"""Name of a tensor and start of a part in it."""

_Owners = dict[str, dict[tuple[int, ...], tuple[int, tuple[int, ...]]]]
"""For each tensor its parts by start: the first rank that holds the part, and the part's shape."""


class MegatronWeights:
    """Loads and exports the weights of this rank's part of a model. Collective: every rank creates one.

    Args:
        chunks: `GPTModel`s of this pipeline stage, with or without Megatron's wrappers.
        architecture: architecture of the model.
        placement: parts that this rank holds.
        group: group of all ranks in order, for plain data and for tensors on the model's device.

    Raises:
        ValueError: no rule covers a parameter, or its shape differs from that of its rule; raised on every rank.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        architecture: Architecture,
        placement: Placement,
        group: dist.ProcessGroup,
    ) -> None:
        self._group = group
        self._is_tied = architecture.tie_word_embeddings
        ignored = range(architecture.num_nextn_predict_layers)
        self._ignored = tuple(f"model.layers.{architecture.num_hidden_layers + number}." for number in ignored)
        self._blocks: list[tuple[torch.Tensor, list[Block]]] = []
        self._copies: list[tuple[torch.Tensor, list[Block]]] = []  # tied embeddings on the last pipeline stage
        with raise_on_all_ranks(group):
            for chunk in map(unwrapped, chunks):
                biases = ((name, bias) for name, bias in chunk.named_buffers() if name.endswith("router.expert_bias"))
                for name, parameter in (*chunk.named_parameters(), *biases):
                    is_copy = self._is_tied and name == _HEAD
                    blocks = blocks_of(_EMBEDDING if is_copy else global_name(chunk, name), architecture, placement)
                    _check_shape(name, parameter, blocks)
                    (self._copies if is_copy else self._blocks).append((parameter, blocks))
        held = {(block.name, block.start): block.shape for _, blocks in self._blocks for block in blocks}
        self._parts: list[dict[_Key, tuple[int, ...]]] = all_gather(held, group)
        self._replicas = {key: _replica(key, self._parts, dist.get_rank(group)) for key in held}

    @torch.no_grad()
    def load(self, files: SafetensorsFiles, *, new: Sequence[str] = (), unused: Sequence[str] = ()) -> None:
        """Load this rank's parts, and nothing else, into the parameters; padding becomes zero.

        Multi-token prediction (MTP) layers are ignored.

        Args:
            new: tensors that may be missing in the checkpoint; they become zero.
            unused: tensors of the checkpoint that the model does not have.

        Raises:
            ValueError: a tensor is missing in the checkpoint, unknown to the model, or has another shape, or tied
                embeddings differ.
        """
        wanted = {name for part in self._parts for name, _ in part}
        missing = wanted - files.shapes.keys() - set(new)
        unknown = files.shapes.keys() - wanted - ({"lm_head.weight"} if self._is_tied else set()) - set(unused)
        unknown = {name for name in unknown if not (name.startswith(self._ignored) or re.search(COMPUTED, name))}
        if missing:
            raise ValueError(
                f"the checkpoint lacks {_list_some(missing)}, which the model of its config.json has; "
                "use config.json and weights of the same model"
            )
        if unknown:
            raise ValueError(
                f"the checkpoint has {_list_some(unknown)}, but the model of its config.json does not; "
                "use config.json and weights of the same model"
            )
        for parameter, blocks in self._blocks + self._copies:
            end = 0
            for block in blocks:
                if block.name not in files.shapes:
                    continue
                shape = files.shapes[block.name]
                if shape != block.global_shape:
                    raise ValueError(
                        f"{block.name} must have the shape {block.global_shape} that config.json implies, got {shape}"
                    )
                if self._is_tied and block.name == "model.embed_tokens.weight":
                    files.check_tied(block.name, "lm_head.weight", block.region)
                end = block.row + block.shape[0]
                parameter[block.row : end].copy_(files.read(block.name, block.region))
            parameter[end:].zero_()  # the vocabulary is padded after its last row

    @torch.no_grad()
    def draw(self, seed: int, std: float, *, zero: Sequence[str] = ()) -> None:
        """Initialize all weights, the same in any layout: matrices from N(0, std), norms one, biases zero.

        Args:
            seed: seed of the random numbers.
            std: standard deviation.
            zero: tensors that become zero instead.
        """
        for parameter, blocks in self._blocks + self._copies:
            parameter.zero_()
            for block in blocks:
                if block.name.endswith("norm.weight"):
                    parameter.fill_(1.0)
                elif not block.name.endswith("bias") and block.name not in zero:
                    generator = torch.Generator(parameter.device).manual_seed(_seed_of(seed, block.name))
                    whole = torch.empty(block.global_shape, device=parameter.device)
                    rows = parameter[block.row : block.row + block.shape[0]]
                    rows.copy_(whole.normal_(0.0, std, generator=generator)[block.region])

    @torch.no_grad()
    def shards(
        self, read: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
    ) -> Iterator[tuple[str, WeightShard]]:
        """Yield this rank's parts of all tensors with the tensor's name. No communication.

        A tensor may have several parts: q, k and v of a layer are interleaved, so each has one part per kv head.

        Args:
            read: returns the values of a parameter, itself or a copy.
        """
        for parameter, blocks in self._blocks:
            values = read(parameter)
            for block in blocks:
                own = values if block.shape[0] == len(values) else values.narrow(0, block.row, block.shape[0])
                replica, num_replicas = self._replicas[block.name, block.start]
                shard = WeightShard(
                    tensor=own,
                    global_shape=block.global_shape,
                    start=block.start,
                    replica=replica,
                    num_replicas=num_replicas,
                )
                yield block.name, shard

    @torch.no_grad()
    def full_tensors(self, dtype: torch.dtype, bucket_bytes: int = 256 << 20) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the model, whole, on every rank, in the order of the layers. Collective.

        Every rank holds one bucket of tensors at a time.

        Args:
            dtype: dtype of the yielded values, except the router's bias of DeepSeek-V3, which stays in float32.
            bucket_bytes: size of the buckets; a larger tensor is a bucket of its own.
        """
        own = {(name, shard.start): shard for name, shard in self.shards()}
        owners = self._owners()
        bucket: list[str] = []
        used = 0
        for name, num_bytes in self.sizes_bytes(dtype):
            if bucket and used + num_bytes > bucket_bytes:
                yield from self._gather(bucket, owners, own, dtype)
                bucket, used = [], 0
            bucket.append(name)
            used += num_bytes
        yield from self._gather(bucket, owners, own, dtype)

    def sizes_bytes(self, dtype: torch.dtype) -> list[tuple[str, int]]:
        """Names and sizes in bytes of `full_tensors`, in its order. No communication."""
        sizes = {name: sum(math.prod(shape) for _, shape in parts.values()) for name, parts in self._owners().items()}
        return [(name, sizes[name] * _exported(name, dtype).itemsize) for name in sorted(sizes, key=_natural)]

    def _owners(self) -> _Owners:
        owners: _Owners = {}
        for rank, part in enumerate(self._parts):
            for (name, start), shape in part.items():
                owners.setdefault(name, {}).setdefault(start, (rank, shape))
        return owners

    def _gather(
        self,
        names: Sequence[str],
        owners: _Owners,
        own: dict[_Key, WeightShard],
        dtype: torch.dtype,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        device = next(iter(own.values())).tensor.device
        parts: dict[tuple[int, torch.dtype], list[tuple[_Key, tuple[int, ...]]]] = {}
        for name in names:
            for start, (rank, shape) in owners[name].items():
                parts.setdefault((rank, _exported(name, dtype)), []).append(((name, start), shape))
        full: dict[str, torch.Tensor] = {}
        for (rank, sent), of_rank in sorted(parts.items(), key=lambda item: str(item[0])):
            if rank == dist.get_rank(self._group):
                flat = torch.cat([own[key].tensor.reshape(-1).to(sent) for key, _ in of_rank])
            else:
                flat = torch.empty(sum(math.prod(shape) for _, shape in of_rank), dtype=sent, device=device)
            dist.broadcast(flat, group=self._group, group_src=rank)
            pieces = flat.split([math.prod(shape) for _, shape in of_rank])
            for ((name, start), shape), piece in zip(of_rank, pieces, strict=True):
                if name not in full:
                    full[name] = torch.empty(_whole_shape(owners[name]), dtype=sent, device=device)
                region = tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))
                full[name][region] = piece.view(shape)
        for name in names:
            yield name, full.pop(name)


def _exported(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an exported tensor. Rounded biases would send tokens to other experts."""
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside Megatron's wrappers (`DistributedDataParallel`, `Float16Module`)."""
    while isinstance(inner := module._modules.get("module"), nn.Module):
        module = inner
    return module


def global_name(chunk: nn.Module, name: str) -> str:
    """Return the name of a chunk's parameter with the number of the layer in the whole model, from 0."""
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    if match is None:
        return name
    layer = chunk.get_submodule(f"decoder.layers.{match[1]}")
    return f"decoder.layers.{int(layer.layer_number) - 1}.{name[match.end() :]}"  # type: ignore[arg-type]


def _check_shape(name: str, parameter: torch.Tensor, blocks: Sequence[Block]) -> None:
    rows = sum(block.shape[0] for block in blocks)
    fits = all(block.shape[1:] == tuple(parameter.shape[1:]) for block in blocks)
    is_padded = name in (_HEAD, _EMBEDDING) and rows < parameter.shape[0]
    if not fits or (rows != parameter.shape[0] and not is_padded):
        shapes = [block.shape for block in blocks]
        raise ValueError(
            f"Megatron's parameter {name} must consist of blocks {shapes}, as its rule in weights/names.py gives, got "
            f"shape {tuple(parameter.shape)}"
        )


def _replica(key: _Key, parts: Sequence[dict[_Key, tuple[int, ...]]], rank: int) -> tuple[int, int]:
    """Index of a rank among the ranks that hold a part, and their number."""
    holders = [other for other, part in enumerate(parts) if key in part]
    return holders.index(rank), len(holders)


def _seed_of(seed: int, name: str) -> int:
    return zlib.crc32(f"{seed} {name}".encode())


def _whole_shape(parts: dict[tuple[int, ...], tuple[int, tuple[int, ...]]]) -> tuple[int, ...]:
    ends = [tuple(at + size for at, size in zip(start, shape, strict=True)) for start, (_, shape) in parts.items()]
    return tuple(max(sizes) for sizes in zip(*ends, strict=True))


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that compares the numbers in a name as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _list_some(names: set[str]) -> str:
    first = sorted(names, key=_natural)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
