"""What engines of the tests have in common: a pause mode, a weight version, and a list of calls."""

from tidemill_weight_update import BucketHandle, PauseMode


class EngineState:
    """Part of an `EngineClient` that does not depend on how weights are loaded.

    Attributes:
        calls: calls that changed the engine, in their order.
        version: weight version.
        paused: mode of the pause, or None.
    """

    def __init__(self, name: str, tp_size: int = 1) -> None:
        self.name = name
        self.tp_size = tp_size
        self.calls: list[str] = []
        self.version = "first"
        self.paused: str | None = None

    def __repr__(self) -> str:
        return self.name

    def pause(self, mode: PauseMode) -> None:
        self.calls.append(f"pause {mode}")
        self.paused = mode

    def resume(self) -> None:
        self.calls.append("resume")
        self.paused = None

    def set_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")
        self.version = version

    def get_weight_version(self) -> str:
        return self.version


class LoaderState(EngineState):
    """`EngineState` of an engine with the fast loader, whose `load` the subclass defines."""

    has_loader = True

    def load_bucket(self, bucket: BucketHandle) -> None:
        raise AssertionError("an engine with the fast loader gets no buckets")

    def flush_cache(self) -> None:
        raise AssertionError("an engine with the fast loader flushes in load()")
