"""One engine rank on the fast path: opens mailboxes and handles requests."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from tidemill_weight_update.control.board import SharedBoard
from tidemill_weight_update.control.descriptor import Request
from tidemill_weight_update.control.mailbox import MIXED, UNCHANGED, Mailbox
from tidemill_weight_update.plan.plan import StoredPlans
from tidemill_weight_update.receive.plan_cache import PlanCache
from tidemill_weight_update.receive.session import UpdateSession
from tidemill_weight_update.remote.engine_link import open_mailbox
from tidemill_weight_update.remote.group_link import LinkAddress, LinkStore, StoreBoard, open_store

ALL_BUCKETS = 1 << 31
"""More buckets than any update has: acknowledging this many releases the trainer from waiting for this rank."""


class Receiver(PlanCache):
    """Loads what trainer ranks publish into a model.

    Args:
        model: model with a `load_weights` that takes (name, tensor) pairs. Its parameters may move between updates.
        rank: rank of this process in its engine.
        num_ranks: number of ranks of the engine.
        may_ignore: returns whether a name that no parameter reads is expected (`lm_head.weight` of a model with tied
            embeddings).
        finish: called after the copies of each update, to recompute what the model derives from its parameters.
        stored: copy plans on disk; None: a plan is recorded at the first update.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        num_ranks: int,
        may_ignore: Callable[[str], bool],
        finish: Callable[[], None],
        stored: StoredPlans | None = None,
    ) -> None:
        super().__init__(model, may_ignore, finish, stored)
        self._rank = rank
        self._num_ranks = num_ranks
        self._link: LinkStore | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._last_updater = ""

    def handle(self, request: Request) -> None:
        """Process one update. Errors are reported to the trainer instead of raised: an exception would crash the
        engine.

        Raises:
            RuntimeError: nobody waits for a report, because the mailbox of rank 0 cannot be opened or is at another
                update.
        """
        if SharedBoard.is_path(request.mailboxes[0]):
            self._link = None
        control = self._open(request.mailboxes[0], request.timeout_s)
        control.trainer_words(request.sequence)  # raises if it is at another update
        row = request.first_receiver + min(self._rank, request.num_receivers - 1)
        boxes, turn = [control], None
        try:
            if self._num_ranks != request.num_receivers:
                raise ValueError(
                    f"the engine has {self._num_ranks} ranks, but its client reported tp_size="
                    f"{request.num_receivers}; fix the client's tp_size"
                )
            self._take_turn(control)
            for path in self._mailboxes.keys() - set(request.mailboxes):
                self._mailboxes.pop(path).close()
            boxes = [control, *self._open_others(request)]
            turn = UpdateSession(self, request, boxes, row)
            with torch.no_grad():
                self.follow_model()
                turn.run()
        except Exception as error:  # noqa: BLE001 - raising would crash the engine
            state = MIXED if turn is not None and turn.changed else UNCHANGED
            if control.is_at(request.sequence):
                reached = control.state(request.sequence, row)  # other ranks may wait until this one has reached it
                reply = {"error": f"{type(error).__name__}: {error}", "reached": reached}
                control.report(request.sequence, row, state, reply)
        finally:
            for box in [box for box in boxes if box.is_at(request.sequence)]:
                box.acknowledge(request.sequence, row, ALL_BUCKETS)

    def _take_turn(self, control: Mailbox) -> None:
        """Raise RuntimeError if another updater has not ended its update."""
        last = self._mailboxes.get(self._last_updater)
        if last is not None and last is not control and last.is_updating():
            raise RuntimeError(
                f"another WeightUpdater (process {last.owner[0]}) is updating this engine; wait for the end of its "
                f"update, close it, or end that process"
            )
        self._last_updater = control.board.path

    def _open_others(self, request: Request) -> Iterator[Mailbox]:
        for rank, path in enumerate(request.mailboxes[1:], start=1):
            try:
                yield self._open(path, request.timeout_s)
            except RuntimeError as error:
                raise RuntimeError(f"trainer rank {rank}: {error}") from error

    def _open(self, path: str, timeout_s: float) -> Mailbox:
        if path in self._mailboxes and not self._mailboxes[path].board.is_current():
            self._mailboxes.pop(path).close()
        if path not in self._mailboxes:
            is_mapped = SharedBoard.is_path(path)
            self._mailboxes[path] = Mailbox(SharedBoard.open(path)) if is_mapped else self._open_linked(path, timeout_s)
        return self._mailboxes[path]

    def _open_linked(self, path: str, timeout_s: float) -> Mailbox:
        address, rank = LinkAddress.from_path(path)
        if self._link is None or self._link.address != address or self._link.is_broken:
            self._link = None  # close the old connection before the next one
            self._link = open_store(address, timeout_s)
        return open_mailbox(StoreBoard(self._link, path, rank), self.device, timeout_s)
