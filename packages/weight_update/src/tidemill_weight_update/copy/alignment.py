"""Alignment of tensors in shared memory."""

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes, so that views of any dtype are valid and copies are
vectorized.
"""


def aligned(offset: int) -> int:
    """Return the smallest multiple of ALIGNMENT that is at least `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
