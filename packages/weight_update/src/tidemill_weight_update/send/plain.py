"""The check of plain tensors on several trainer ranks: rank 0 sends them, so it must have all of them."""

import json

from tidemill_weight_update.send.ranks import Ranks
from tidemill_weight_update.tensors.source import PlainNames


class PlainCheck:
    """Finds plain tensors that no rank sends, and caches the result for unchanged names."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._in_order: list[int] = []

    def exchange(self, error: Exception | None, plain: PlainNames, timeout_s: float | None) -> None:
        """Call `Ranks.exchange` and compare the names of the plain tensors.

        Raises:
            ValueError: a rank has a plain tensor that rank 0 does not have; raised on every rank.
        """
        digest = plain.digest if self._ranks.size > 1 else 0
        digests = [row[0] for row in self._ranks.exchange(error, [digest], timeout_s)]
        if all(other in (0, digests[0]) for other in digests) or digests == self._in_order:
            return
        first, *others = [set(json.loads(text)) for text in self._ranks.gather_texts(json.dumps(sorted(plain.names)))]
        for rank, names in enumerate(others, start=1):
            if unsent := sorted(names - first):
                raise ValueError(
                    f"rank {rank} of {self._ranks.size} passes {len(unsent)} plain tensors that rank 0 does not have, "
                    f"but only rank 0 sends plain tensors: {', '.join(map(repr, unsent[:5]))}; pass tensors that only "
                    f"some ranks have as LocalShard(tensor=..., global_shape=..., start=(0, ...))"
                )
        self._in_order = digests
