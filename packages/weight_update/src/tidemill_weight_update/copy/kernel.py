"""The kernel in which each thread block copies, casts and sums a tile, and finds NaNs.

Its arithmetic is that of `checksum`, which defines the numbers; its tables are those of `tiles`.
"""

# Triton kernels look like Python functions but are not: compile-time arguments are upper case, and pyright infers
# wrong types.
# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from tidemill_weight_update.copy.checksum import GROUP_BYTES, LANE_FACTOR, MIX_FACTORS, MIX_START

_MIX_START = tl.constexpr(MIX_START)
_MIX_0, _MIX_1 = tl.constexpr(MIX_FACTORS[0]), tl.constexpr(MIX_FACTORS[1])
_LANE = tl.constexpr(LANE_FACTOR)
_GROUP_BITS = tl.constexpr(8 * GROUP_BYTES)


@triton.jit
def _fold(product):
    return (product ^ (product >> 32)).to(tl.uint32)


@triton.jit
def _mix32(number):
    """mix32(number - MIX_START)"""
    number = _fold(number.to(tl.uint64) * _MIX_0)
    return _fold(number.to(tl.uint64) * _MIX_1)


@triton.constexpr_function
def _power(exponent):
    return pow(LANE_FACTOR, exponent, 2**32)


@triton.jit
def _powers(lanes, LANES: tl.constexpr):
    """Return LANE_FACTOR ** lane mod 2**32 for lanes below LANES."""
    powers = tl.where(lanes & 1 != 0, _power(1), 1).to(tl.uint32)
    if LANES > 2:
        powers *= tl.where(lanes & 2 != 0, _power(2), 1).to(tl.uint32)
    if LANES > 4:
        powers *= tl.where(lanes & 4 != 0, _power(4), 1).to(tl.uint32)
    if LANES > 8:
        powers *= tl.where(lanes & 8 != 0, _power(8), 1).to(tl.uint32)
    return powers


@triton.jit
def _checksum(numbers, position, BITS: tl.constexpr, PACKED: tl.constexpr, UNIT: tl.constexpr):
    """Sum over a tile of numbers, uint32 [R, C]; position: position of its rows in numbers, int64 [R]."""
    R: tl.constexpr = numbers.shape[0]
    C: tl.constexpr = numbers.shape[1]
    LANES: tl.constexpr = _GROUP_BITS // BITS
    NUMBERS: tl.constexpr = LANES // PACKED  # per group
    if UNIT > 1:  # rows start at groups: a thread has all numbers of a group
        numbers = tl.reshape(numbers, (R, C // NUMBERS, NUMBERS))
        powers = _powers(tl.arange(0, NUMBERS) * PACKED, LANES)[None, None, :]
        total = (numbers & ((1 << BITS) - 1)).to(tl.uint64) * powers.to(tl.uint64)
        for lane in tl.static_range(1, PACKED):
            powers *= _LANE
            total += ((numbers >> (BITS * lane)) & ((1 << BITS) - 1)).to(tl.uint64) * powers.to(tl.uint64)
        total = tl.sum(total, 2)
        group = (position // NUMBERS).to(tl.uint32)[:, None] + tl.arange(0, C // NUMBERS).to(tl.uint32)[None, :]
    else:  # one element per number
        at = position[:, None] + tl.arange(0, C)[None, :]
        total = numbers.to(tl.uint64) * _powers((at & (LANES - 1)).to(tl.uint32), LANES).to(tl.uint64)
        group = (at // LANES).to(tl.uint32)
    return tl.sum((total * (_mix32(group + _MIX_START) | 1).to(tl.uint64)).to(tl.int64))


@triton.constexpr_function
def _repeat(packed):
    """Return a 1 in each lane of a number."""
    return {1: 1, 2: 0x10001, 4: 0x1010101}[packed]


@triton.jit
def _carries(numbers, BITS: tl.constexpr, PACKED: tl.constexpr, NON_FINITE: tl.constexpr):
    """Return numbers in which the highest bit of an element is set exactly if all bits NON_FINITE of the element are
    set.

    Adding the lowest of these bits carries into the highest. The other bits of the result have no meaning.
    """
    return (numbers & NON_FINITE * _repeat(PACKED)) + (NON_FINITE & -NON_FINITE) * _repeat(PACKED)


@triton.jit
def copy_tiles(
    tile_segment,
    segments,
    memories,
    targets,
    checksums,
    non_finite,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    SENT: tl.constexpr,
    CAST: tl.constexpr,
    CHECKSUM_TARGET: tl.constexpr,
    BITS: tl.constexpr,
    PACKED: tl.constexpr,
    UNIT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    STRIDE: tl.constexpr,
    WRITE: tl.constexpr,
    CHECKSUM: tl.constexpr,
    NON_FINITE: tl.constexpr,
    HALVES: tl.constexpr,
):
    tile = tl.program_id(0)
    segment = segments + tl.load(tile_segment + tile).to(tl.int64) * STRIDE
    # In the order of `TileGroup.segments`.
    tensor = tl.load(segment)
    source = tl.load(memories + tl.load(segment + 1)).to(tl.pointer_type(SRC))
    src, src_pitch = tl.load(segment + 2) * UNIT, tl.load(segment + 3) * UNIT
    rows, cols = tl.load(segment + 7), tl.load(segment + 8) * UNIT
    pos, pos_pitch = tl.load(segment + 9), tl.load(segment + 10)
    index = tile - tl.load(segment + 11).to(tl.int32)
    tiles_across = tl.load(segment + 12).to(tl.int32)
    down = index // tiles_across
    across = index - down * tiles_across

    row, col = tl.arange(0, R), tl.arange(0, C)
    rows_down = row.to(tl.int64)[:, None]
    if UNIT > 1:
        source = tl.multiple_of(
            source, 16
        )  # Triton applies the hint to pointers only, not to the integer it was cast from
    row0, col0 = down.to(tl.int64) * R, across.to(tl.int64) * C
    num_cols = tl.multiple_of(tl.minimum(cols - col0, C).to(tl.int32), UNIT)
    inside = (row < tl.minimum(rows - row0, R).to(tl.int32))[:, None] & (col < num_cols)[None, :]
    read = source + (src + row0 * src_pitch + col0)
    value = tl.load(read + (rows_down * src_pitch + col[None, :]), mask=inside, other=0)
    cast = value
    if CAST:
        cast = value.to(DST)
    if WRITE:
        target = tl.load(targets + tl.load(segment + 4)).to(tl.pointer_type(DST))
        dst, dst_pitch = tl.load(segment + 5) * UNIT, tl.load(segment + 6) * UNIT
        if UNIT > 1:
            target = tl.multiple_of(target, 16)
        written = target + (dst + row0 * dst_pitch + col0)
        tl.store(written + (rows_down * dst_pitch + col[None, :]), cast, mask=inside)

    sent = value
    if CHECKSUM_TARGET:
        sent = cast
    if CAST:
        sent = sent.to(SENT, bitcast=True)
    sent = sent.to(tl.uint32)
    if CHECKSUM:
        position = pos + row0 * pos_pitch + col0 + tl.arange(0, R) * pos_pitch
        tl.atomic_add(checksums + tensor, _checksum(sent, position, BITS, PACKED, UNIT), sem="relaxed")
    if NON_FINITE:
        found = _carries(sent, BITS, PACKED, NON_FINITE)
        if HALVES:
            odd = (pos + col0 + row0 * pos_pitch + rows_down * pos_pitch + col[None, :]) & 1 == 1
            found = tl.where(odd, found, 0)
        found = found & (1 << (BITS - 1)) * _repeat(PACKED)
        if UNIT > 1:  # the numbers that a thread has loaded at once
            found = tl.max(tl.reshape(found, (R, C // UNIT, UNIT)), 2)
        # Without a reduction over the block, which would cost a tenth of the bandwidth.
        tl.store(non_finite + tensor + tl.zeros_like(found).to(tl.int32), 1, mask=found != 0)
