"""The copy plan of a model for the sources announced so far."""

from collections.abc import Sequence

from torch import nn

from tidemill_weight_update.plan.plan import CopyPlan, Fill
from tidemill_weight_update.plan.record import record, write_fills
from tidemill_weight_update.tensors.spec import SourceSpec


class Recorder:
    """Keeps the copy plan of a model, and records new sources only.

    Args:
        model: model with SGLang's `load_weights`.

    Attributes:
        sources: sources of `plan`, by name.
        plan: the plan; replaced by a new object whenever it changes, so that caches built for an old plan are
            recognized.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._received: dict[str, SourceSpec] = {}
        self.forget()

    def forget(self) -> None:
        """Discard all sources and the plan."""
        self.sources: dict[str, SourceSpec] = {}
        self.plan = CopyPlan(copies=())
        self._fills: list[Fill] = []
        self._filled: dict[str, nn.Parameter] = {}  # cached: a model has thousands of other parameters
        self._proven = False

    def cover(self, sources: Sequence[SourceSpec]) -> None:
        """Set `plan` to the plan of exactly these sources, recorded as a whole, so that its coverage is exact.

        Raises:
            RuntimeError: the model rejects a source.
        """
        before = self.plan
        self.record_all(sources)
        if self.plan is not before:
            self._fills = list(self.plan.fills)

    def begin(self, *, all_come: bool) -> None:
        """Start an update; its sources are those of `cover`, or are passed to `extend`.

        If all parameters are written, so are the constants: an engine may have released its memory since the last
        update.
        """
        self._received = {}
        if all_come and self._proven:
            self._fills = list(self.plan.fills)

    def extend(self, sources: Sequence[SourceSpec]) -> None:
        """Add sources to `plan`, whose coverage is then unknown.

        If one has another shape or dtype than at the last update, all others may have changed too: then `plan` contains
        only the sources passed since `begin`.

        Raises:
            RuntimeError: the model rejects a source.
        """
        if any(source != self.sources.get(source.name, source) for source in sources):
            self.forget()
            self._add(list(self._received.values()))
            self._fills = []  # already written, and later copies may have overwritten them
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
        """Do what `cover` does, after these sources were loaded in parts together with their constants."""
        wanted = {source.name: source for source in sources}
        if not self._proven or wanted != self.sources:
            self.plan = record(self._model, list(wanted.values()))
            self.sources = wanted
            self._proven = True

    def write_fills(self) -> None:
        """Write the constants added to the plan since the last call; all of them at the start of an update of all
        parameters. Copies of their sources must follow.
        """
        if not self._fills:
            return
        if any(fill.parameter not in self._filled for fill in self._fills):
            names = {fill.parameter for fill in (*self._fills, *self.plan.fills)}
            self._filled = {name: p for name, p in self._model.named_parameters() if name in names}
        write_fills(self._filled, self._fills)
        self._fills = []
