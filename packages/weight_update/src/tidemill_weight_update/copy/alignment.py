"""Where tensors begin in shared memory."""

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes: views of any dtype are legal and copies are vectorised."""


def aligned(offset: int) -> int:
    """The first multiple of ALIGNMENT that is not below `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
