"""Check that our update leaves the same parameters in the engine as stock SGLang."""

from collections.abc import Callable

from weight_update.engine import BenchEngine
from weight_update.trainer import Trainer


def check_arrival(
    trainer: Trainer, engine: BenchEngine | None, stock: Callable[[str], None], ours: Callable[[str], object]
) -> str:
    """Compare all parameters of the engine, in place, after `stock(version)` and after `ours(version)`. Collective.

    First with new values for all tensors and everything overwritten in between, then with one tensor changed.

    Returns:
        A description of the result; empty on ranks other than 0.

    Raises:
        RuntimeError: parameters differ that should be equal, or the reverse.
    """
    trainer.change()
    stock("stock, new values")
    kept = _on_engine(engine, "remember") + _on_engine(engine, "scramble")
    trainer.synchronize()
    ours("ours, new values")
    _expect(engine, set())
    name = trainer.weights[len(trainer.weights) // 2].name
    trainer.change(name)
    trainer.synchronize()
    ours("ours, one tensor changed")
    changed = _expect(engine, None)
    trainer.synchronize()
    _on_engine(engine, "forget")
    trainer.synchronize()
    if engine is None:
        return ""
    return (
        f"{sum(kept[: len(kept) // 2]) / 1e9:.4g} GB of engine parameters equal after stock and ours; a change of "
        f"{name} changed {', '.join(sorted(changed))}"
    )


def _on_engine(engine: BenchEngine | None, operation: str) -> list:
    return [] if engine is None else engine.probe(operation)


def _expect(engine: BenchEngine | None, expected: set[str] | None) -> set[str]:
    """Return the names of parameters that differ from the remembered ones; expect `expected`, or (None) exactly one."""
    if engine is None:
        return set()
    different = {name for answer in engine.probe("compare") for name in answer}
    if different != expected and (expected is not None or len(different) != 1):
        some = ", ".join(sorted(different)[:5])
        raise RuntimeError(
            f"after our update {len(different)} parameters of the engine differ from what stock SGLang loaded "
            f"({some}), expected {'one' if expected is None else len(expected)}"
        )
    return different
