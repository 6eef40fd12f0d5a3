"""The names of a rank's plain tensors, which ranks compare by hash."""

import hashlib
import json
from functools import cached_property


class PlainNames:
    """The names of the plain tensors that a rank passed in an update. Read `digest` after all names are added."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    @cached_property
    def digest(self) -> int:
        """Signed 64-bit hash of the names; 0 if there are none."""
        if not self.names:
            return 0
        text = json.dumps(sorted(self.names)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
