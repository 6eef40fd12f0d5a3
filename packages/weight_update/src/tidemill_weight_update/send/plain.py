"""Plain tensors of several trainer ranks: those of rank 0 are sent, so it must have all."""

import json

from tidemill_weight_update.send.ranks import Ranks
from tidemill_weight_update.tensors.plain_names import PlainNames


class PlainCheck:
    """Finds plain tensors that are not sent, and remembers what it has found to be in order."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._in_order: list[int] = []

    def exchange(self, error: Exception | None, plain: PlainNames, timeout_s: float) -> None:
        """`Ranks.exchange`, with what has to be known of plain tensors.

        Raises:
            ValueError: on every rank: one has a plain tensor that rank 0 has not.
        """
        digest = plain.digest if self._ranks.size > 1 else 0
        digests = [row[0] for row in self._ranks.exchange(error, [digest], timeout_s)]
        if all(other in (0, digests[0]) for other in digests) or digests == self._in_order:
            return
        first, *others = [set(json.loads(text)) for text in self._ranks.gather_texts(json.dumps(sorted(plain.names)))]
        for rank, names in enumerate(others, start=1):
            if unsent := sorted(names - first):
                raise ValueError(
                    f"rank {rank} of {self._ranks.size} passes {len(unsent)} plain tensors that rank 0 does not, and "
                    f"of plain tensors those of rank 0 are sent: {', '.join(map(repr, unsent[:5]))}; pass each as "
                    f"LocalShard(tensor=..., global_shape=...) where only some ranks have it"
                )
        self._in_order = digests
