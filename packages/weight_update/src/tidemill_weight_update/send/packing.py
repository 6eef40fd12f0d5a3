"""Packing of pieces into buckets of the fast path."""

from collections.abc import Iterable, Iterator

from tidemill_weight_update.copy.alignment import aligned
from tidemill_weight_update.send.fast_bucket import FastBucket, in_arena, split
from tidemill_weight_update.send.modules import by_module
from tidemill_weight_update.tensors.shards import Piece
from tidemill_weight_update.tensors.spec import SourceSpec


def pack(pieces: Iterable[Piece], bucket_bytes: int) -> Iterator[FastBucket]:
    """Pack pieces into buckets of at most `bucket_bytes`, in their order, reading one module ahead.

    The tensors of one module (`layers.0.self_attn.q_proj.weight`, `...k_proj.weight`) share a bucket if they fit;
    otherwise the first of their buckets announces all of them, so that an engine that combines them records them
    together.
    """
    pieces_in_bucket: list[Piece] = []
    announced: list[SourceSpec] = []
    used = 0
    for module in by_module(pieces, lambda piece: piece.spec.name):
        parts = [part for piece in module for part in split(piece, bucket_bytes)]
        if pieces_in_bucket and used + sum(map(_room, parts[:-1])) + _bytes(parts[-1]) > bucket_bytes:
            yield in_arena(pieces_in_bucket, announced)
            pieces_in_bucket, announced, used = [], [], 0
        announced += [piece.spec for piece in module]
        for part in parts:
            if pieces_in_bucket and used + _bytes(part) > bucket_bytes:
                yield in_arena(pieces_in_bucket, announced)
                pieces_in_bucket, announced, used = [], [], 0
            pieces_in_bucket.append(part)
            used += _room(part)
    if pieces_in_bucket:
        yield in_arena(pieces_in_bucket, announced)


def _room(piece: Piece) -> int:
    return aligned(_bytes(piece))


def _bytes(piece: Piece) -> int:
    return piece.box.numel * piece.spec.dtype.itemsize
