"""One update on the fast path: the calls that ask the engines to load, and the tensors that they read meanwhile."""

from collections.abc import Callable

import torch

from tidemill_weight_update.control.descriptor import Request
from tidemill_weight_update.control.readers import Readers
from tidemill_weight_update.failure import Failure
from tidemill_weight_update.send.declaration import Declaration
from tidemill_weight_update.send.fast import FastPath
from tidemill_weight_update.send.fleet import Fleet, Member
from tidemill_weight_update.send.ranks import PlainCheck, RankLostError
from tidemill_weight_update.stats import Stages
from tidemill_weight_update.tensors.source import PlainNames, Source


class FastUpdate:
    """One update of all engines with the tidemill loader. Each is called once, in a thread, by rank 0.

    Args:
        fleet: engines of the update; empty except on rank 0.
        fast: fast path of this rank.
        plain: check of the plain tensors of all ranks.
        sequence: number of the update.
        request: returns the request for an engine.
        check: raises if the tensors must not be sent; called before the engines are.
        starts_early: whether the engines are called before this rank reads its tensors; otherwise a GPU reads first,
            unless the engines have a new declaration to read meanwhile.
    """

    def __init__(
        self,
        fleet: Fleet,
        fast: FastPath,
        plain: PlainCheck,
        sequence: int,
        request: Callable[[Member], Request],
        check: Callable[[], None],
        *,
        starts_early: bool,
    ) -> None:
        self._fleet = fleet
        self._fast = fast
        self._plain = plain
        self._sequence = sequence
        self._request = request
        self._check = check
        self._starts_early = starts_early

    def run(
        self,
        source: Source,
        declaration: Declaration | None,
        stages: Stages,
        *,
        control: str,
        num_receivers: int,
        timeout_s: float,
    ) -> tuple[int, int, int]:
        """Send the tensors of this rank while the engines read those of all ranks; return when all have responded.

        Args:
            source: the tensors.
            declaration: their declaration; None: they are declared here.
            stages: receives the time of each stage.
            control: path of the mailbox of trainer rank 0.
            num_receivers: number of engine ranks.
            timeout_s: longest wait for another trainer rank when this one has sent everything.

        Returns:
            Numbers of buckets, tensors and bytes.

        Raises:
            Exception: the error of this rank or of another one.
        """
        failure = Failure()
        plain = PlainNames()
        counts, is_sent = (0, 0, 0), False
        try:
            # Buffers are kept and written again later, so they must not be inference tensors.
            with failure, torch.inference_mode(False), torch.no_grad():
                with stages("prepare"):
                    declaration = declaration or self._fast.declare(source)
                    plain = declaration.plain
                    buckets = self._fast.prepare(declaration, source)
                if self._starts_early or self._fast.is_new:
                    self._start()
                counts = self._fast.send(buckets, control, num_receivers, stages, self._start, self._hold)
                is_sent = True
            if not is_sent:  # the engines would wait
                self._cancel()
            # The engines compare checksums meanwhile. Other ranks may wait for engines now, with a timeout.
            self._plain.exchange(failure.error, plain, timeout_s)
        except RankLostError:
            is_sent = False
            raise
        finally:  # also after an interrupt
            if not is_sent:
                self._cancel()
            with stages("load"):
                self._fleet.join(self._sequence, self._fast.mailbox)
        return counts

    def _start(self) -> None:
        """Start the load calls unless they are running; threads wait for the responses."""
        if not self._fleet.calls:
            self._check()
            self._fleet.load(self._request, self._fast.mailbox)

    def _hold(self, readers: Readers) -> None:
        """Hold back requests that could start before the engines have loaded."""
        self._fleet.hold(self._sequence, self._fast.mailbox, readers)

    def _cancel(self) -> None:
        """Mark this rank as failed for waiting engines; if no engine was called, report to other ranks that none
        will read.
        """
        self._fast.fail()
        if not self._fleet.calls:
            self._fleet.exclude(self._sequence, self._fast.mailbox)
