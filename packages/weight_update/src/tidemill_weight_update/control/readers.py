"""The engine ranks that read from a trainer rank, as the trainer rank sees them."""

from collections.abc import Iterable

from torch import Tensor

from tidemill_weight_update.control.descriptor import BucketDescriptor
from tidemill_weight_update.control.mailbox import IDLE, Mailbox
from tidemill_weight_update.control.wait import PollingWait


class Readers:
    """The engine ranks that must read what this trainer rank publishes.

    Args:
        sequence: number of the update.
        own: this rank's mailbox, where engine ranks acknowledge what they have read.
        control: mailbox of trainer rank 0, where they report.
        num_receivers: number of engine ranks; their rows are 0 to `num_receivers - 1`.
        timeout_s: longest wait for one of them to make progress.

    Attributes:
        max_wait_s: longest wait of this rank while other engines wait for it.
    """

    def __init__(self, sequence: int, own: Mailbox, control: Mailbox, num_receivers: int, timeout_s: float) -> None:
        self._sequence = sequence
        self._own = own
        self._control = control
        self._num_receivers = num_receivers
        self._rows = set(range(num_receivers))
        self._timeout_s = self.max_wait_s = timeout_s

    def deliver(self, bucket: int, descriptor: BucketDescriptor, arena: Tensor | None) -> None:
        """Send a published bucket to the readers that cannot map it; here there are none.

        Args:
            descriptor: descriptor of the bucket.
            arena: memory that holds the bucket, uint8; None if it is read in place.

        Raises:
            TimeoutError: an engine made no progress in time.
        """

    def wait(self, num_buckets: int) -> None:
        """Return when no reader needs the first `num_buckets` buckets any more. Failed and exited readers need none.

        Rank 0 excludes engine ranks that make no progress, for all trainer ranks; the other ranks wait longer than it.

        Raises:
            TimeoutError: an engine made no progress in time and rank 0 did not exclude it.
        """
        is_first = self._own is self._control
        timeout_s = self._timeout_s if is_first else 2 * self._timeout_s
        wait = PollingWait(timeout_s, f"engines to read bucket {num_buckets - 1}", self._drop_exited)
        slowest = self._slowest()
        while slowest < num_buckets:
            try:
                wait.pause()
            except TimeoutError:
                if not is_first:
                    raise
                self._exclude_slow(num_buckets)
            now = self._slowest()
            if now != slowest:
                wait.progress()
            slowest = now

    def wait_until_started(self, rows: Iterable[int]) -> None:
        """Return when all of `rows` have started the update, or after a timeout without progress."""
        wait = PollingWait(self.max_wait_s, "engines to start", self._drop_exited)
        pending = set(rows)
        while pending := pending & self._rows:
            started = {row for row in pending if self._control.state(self._sequence, row) != IDLE}
            pending -= started
            if started:
                wait.progress()
                continue
            try:
                wait.pause()
            except TimeoutError:
                return

    def _exclude_slow(self, num_buckets: int) -> None:
        released = self._own.acknowledged(self._sequence, self._num_receivers)
        for row in [row for row in self._rows if released[row] < num_buckets]:
            self._control.exclude(self._sequence, row)
            self._rows.remove(row)

    def _slowest(self) -> float:
        if not self._rows:
            return float("inf")
        return int(self._own.acknowledged(self._sequence, self._num_receivers)[list(self._rows)].min())

    def _drop_exited(self) -> None:
        for row in list(self._rows):
            excluded = self._control.is_excluded(self._sequence, row)
            if excluded or self._control.receiver_has_exited(self._sequence, row):
                self._rows.remove(row)
