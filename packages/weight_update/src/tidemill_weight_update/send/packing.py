"""Which pieces travel together."""

from collections.abc import Iterable, Iterator

from tidemill_weight_update.copy.alignment import aligned
from tidemill_weight_update.send.fast_bucket import Outgoing, in_arena, split
from tidemill_weight_update.send.modules import by_module
from tidemill_weight_update.tensors.shards import Held
from tidemill_weight_update.tensors.spec import SourceSpec


def pack(pieces: Iterable[Held], bucket_bytes: int) -> Iterator[Outgoing]:
    """Packs pieces into lines of at most `bucket_bytes`, in their order, reading one module ahead.

    The tensors of one module (`layers.0.self_attn.q_proj.weight`, `...k_proj.weight`) travel in one line if they fit;
    else the first of their lines announces all of them. So an engine that has to combine them knows them together.
    """
    line: list[Held] = []
    announced: list[SourceSpec] = []
    used = 0
    for module in by_module(pieces, lambda piece: piece.spec.name):
        parts = [part for piece in module for part in split(piece, bucket_bytes)]
        if line and used + sum(map(_room, parts[:-1])) + _bytes(parts[-1]) > bucket_bytes:
            yield in_arena(line, announced)
            line, announced, used = [], [], 0
        announced += [piece.spec for piece in module]
        for part in parts:
            if line and used + _bytes(part) > bucket_bytes:
                yield in_arena(line, announced)
                line, announced, used = [], [], 0
            line.append(part)
            used += _room(part)
    if line:
        yield in_arena(line, announced)


def _room(piece: Held) -> int:
    return aligned(_bytes(piece))


def _bytes(piece: Held) -> int:
    return piece.box.numel * piece.spec.dtype.itemsize
