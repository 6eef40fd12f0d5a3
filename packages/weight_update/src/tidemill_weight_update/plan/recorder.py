"""What a model takes of the tensors that were announced so far."""

from collections.abc import Sequence

from torch import nn

from tidemill_weight_update.plan.plan import CopyPlan, Fill
from tidemill_weight_update.plan.record import record, write_fills
from tidemill_weight_update.tensors.spec import SourceSpec


class Recorder:
    """Keeps the copy plan of a model and records anew what is new.

    Args:
        model: with SGLang's `load_weights`.

    Attributes:
        sources: by name, what `plan` is of.
        plan: another object whenever it changes, so that what was built on one is told apart from what was not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._received: dict[str, SourceSpec] = {}
        self.forget()

    def forget(self) -> None:
        """Starts from nothing, as if no source had ever come."""
        self.sources: dict[str, SourceSpec] = {}
        self.plan = CopyPlan(copies=())
        self._fills: list[Fill] = []
        self._filled: dict[str, nn.Parameter] = {}  # thousands of others are not looked for at each update
        self._proven = False

    def cover(self, sources: Sequence[SourceSpec]) -> None:
        """Makes `plan` that of exactly these sources, recorded as a whole, so that it tells what is covered.

        Raises:
            RuntimeError: the model refuses a source.
        """
        before = self.plan
        self.record_all(sources)
        if self.plan is not before:
            self._fills = list(self.plan.fills)

    def begin(self, *, all_come: bool) -> None:
        """Starts an update; its sources are those of `cover`, or come to `extend`.

        If all parameters are written anew, so are the constants: memory may have been given back and taken again since.
        """
        self._received = {}
        if all_come and self._proven:
            self._fills = list(self.plan.fills)

    def extend(self, sources: Sequence[SourceSpec]) -> None:
        """Adds sources to `plan`, which proves nothing about coverage then.

        If one has another shape or dtype than at the last update, all others may have, too: then `plan` is that of the
        sources that came since `begin`.

        Raises:
            RuntimeError: the model refuses a source.
        """
        if any(source != self.sources.get(source.name, source) for source in sources):
            self.forget()
            self._add(list(self._received.values()))
            self._fills = []  # they are written, and copies that came since may lie there
        self._received |= {source.name: source for source in sources}
        self._add([source for source in sources if source.name not in self.sources])

    def _add(self, new: Sequence[SourceSpec]) -> None:
        if not new:
            return
        part = record(self._model, new)
        self.sources |= {source.name: source for source in new}
        self._fills += part.fills
        self._proven = False
        self.plan = CopyPlan(
            copies=self.plan.copies + part.copies,
            through_loader=self.plan.through_loader | part.through_loader,
            converted=self.plan.converted + part.converted,
            unused=self.plan.unused + part.unused,
        )

    def record_all(self, sources: Sequence[SourceSpec]) -> None:
        """What `cover` does, after all of these sources were loaded in parts, with the constants of each."""
        wanted = {source.name: source for source in sources}
        if not self._proven or wanted != self.sources:
            self.plan = record(self._model, list(wanted.values()))
            self.sources = wanted
            self._proven = True

    def write_fills(self) -> None:
        """Writes the constants that came to the plan since the last call, or all, if an update that brings all begins.
        Copies of their sources come afterwards."""
        if not self._fills:
            return
        if any(fill.parameter not in self._filled for fill in self._fills):
            names = {fill.parameter for fill in (*self._fills, *self.plan.fills)}
            self._filled = {name: p for name, p in self._model.named_parameters() if name in names}
        write_fills(self._filled, self._fills)
        self._fills = []
