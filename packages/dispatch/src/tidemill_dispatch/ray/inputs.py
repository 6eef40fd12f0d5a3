"""The arguments of one call as they arrive in a worker's process."""

from collections.abc import Sequence
from typing import Any

from tidemill_dispatch.batch import real_rows
from tidemill_dispatch.ray.chain import ChainedShard
from tidemill_dispatch.ray.pickling import Packed
from tidemill_dispatch.sharding import PaddedShard, Padding


class CallInputs:
    """Turns what was sent into the method's arguments, and takes the padding from its result.

    Args:
        receipts: of the calls that rows come from.
        padding: of the method.
    """

    def __init__(self, receipts: Sequence[Any], padding: Padding | None):
        self._receipts = receipts
        self._padding = padding
        self._shard: PaddedShard | None = None
        self._chained: list[tuple[str, int]] = []

    def take(self, value: Any) -> Any:
        """The argument itself.

        Raises:
            ValueError: a shard has other rows than the other batches of the call.
            What `ChainedShard.fetch` and `PaddedShard.pad` raise.
        """
        if isinstance(value, Packed):
            value = value.unpack()
        elif isinstance(value, ChainedShard):
            shard = value.fetch(self._receipts)
            if value.is_whole:
                return shard.rows
            self._check_rows(f"{value.upstream.method!r} of group {value.upstream.group!r}", shard.num_real)
            value = shard
        if not isinstance(value, PaddedShard):
            return value
        self._shard = value
        return value.rows if self._padding is None else value.pad(self._padding)

    def _check_rows(self, where: str, num_rows: int) -> None:
        self._chained.append((where, num_rows))
        if num_rows != self._chained[0][1]:
            rows = ", ".join(f"{source}: {length}" for source, length in self._chained)
            raise ValueError(
                f"the batches of one call must have the same number of rows; this rank's shards have {rows}"
            )

    def finish(self, result: Any) -> Any:
        """The method's result without padding, whoever added it; raises as `PaddedShard.unpad` does."""
        if self._shard is not None and self._padding is not None:
            result = self._shard.unpad(result, self._padding)
        return real_rows(result)
