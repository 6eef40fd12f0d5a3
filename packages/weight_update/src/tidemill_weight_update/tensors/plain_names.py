"""The names of the plain tensors of an update, compared between trainer ranks by hash."""

import hashlib
import json
from functools import cached_property


class PlainNames:
    """The names under which a rank passed plain tensors in an update; `digest` is asked for when all are there."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    @cached_property
    def digest(self) -> int:
        """A signed 64-bit number that ranks compare; 0 if there are none."""
        if not self.names:
            return 0
        text = json.dumps(sorted(self.names)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
