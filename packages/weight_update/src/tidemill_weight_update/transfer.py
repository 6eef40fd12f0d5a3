"""The handle of declared tensors."""

from collections.abc import Callable, Sequence

from tidemill_weight_update.client import EngineClient
from tidemill_weight_update.send.declaration import Declaration
from tidemill_weight_update.stats import UpdateStats
from tidemill_weight_update.tensors.source import Source


class Transfer:
    """Tensors that `WeightUpdater.declare` described once, to be sent at every step.

    It keeps the tensors alive and is valid until their memory moves.

    Attributes:
        source: the tensors of this rank, or the function that makes them.
        declaration: their description.
        partial: whether parameters of the engines without a tensor keep their values.
        number: number of the declaration, equal on all ranks.
    """

    def __init__(
        self,
        source: Source,
        declaration: Declaration,
        *,
        partial: bool,
        number: int,
        send: "Callable[[Transfer, str, Sequence[EngineClient] | None], UpdateStats]",
    ) -> None:
        self.source = source
        self.declaration = declaration
        self.partial = partial
        self.number = number
        self._send = send

    def send(self, weight_version: int | str) -> UpdateStats:
        """Load the tensors into the engines as `WeightUpdater.update` does, without describing them again.

        Collective. Everything but infinite and NaN elements is checked before an engine changes anything.

        Args:
            weight_version: version that the engines report afterwards, as a string.

        Raises:
            ValueError: another rank sends another declaration, the declared function returned other tensors (engines
                that loaded some of them are paused and excluded), or an error of `WeightUpdater.update`.
            RuntimeError: the memory of a declared tensor has moved (nothing was sent), or an error of
                `WeightUpdater.update`.
        """
        return self._send(self, str(weight_version), None)

    def readmit(self, engines: Sequence[EngineClient], weight_version: int | str) -> UpdateStats:
        """Load the tensors into engines that failed or join late; see `WeightUpdater.readmit`."""
        return self._send(self, str(weight_version), engines)

    def check_memory(self) -> None:
        """Raise RuntimeError if the memory of a declared tensor has moved."""
        moved = [] if callable(self.source) else self.declaration.moved(self.source)
        if moved:
            raise RuntimeError(
                f"the memory of {len(moved)} declared tensors has moved since declare(): "
                f"{', '.join(map(repr, moved[:5]))}; call declare() again after tensors are replaced, offloaded or "
                f"moved, or call update(), which does it for you"
            )
