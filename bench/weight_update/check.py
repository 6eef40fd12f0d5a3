"""Check that our update leaves the same parameters in each engine as stock SGLang."""

from collections.abc import Callable

from weight_update.engine import BenchEngines
from weight_update.trainer import Trainer


def check_arrival(
    trainer: Trainer, engines: BenchEngines, stock: Callable[[str], None], ours: Callable[[str], object]
) -> str:
    """Compare all parameters of the engines, in place, after `stock(version)` and after `ours(version)`. Collective.

    First with new values for all tensors and everything overwritten in between, then with one tensor changed.

    Returns:
        A description of the result; empty on ranks other than 0.

    Raises:
        RuntimeError: parameters differ that should be equal, or the reverse.
    """
    trainer.change()
    stock("stock, new values")
    kept = engines.probe("remember")
    engines.probe("scramble")
    trainer.synchronize()
    ours("ours, new values")
    _expect(engines, set())
    name = trainer.weights[len(trainer.weights) // 2].name
    trainer.change(name)
    trainer.synchronize()
    ours("ours, one tensor changed")
    changed = _expect(engines, None)
    trainer.synchronize()
    engines.probe("forget")
    trainer.synchronize()
    if not engines:
        return ""
    return (
        f"{sum(map(sum, kept)) / 1e9:.4g} GB of engine parameters equal after stock and ours; a change of "
        f"{name} changed {', '.join(sorted(changed))}"
    )


def _expect(engines: BenchEngines, expected: set[str] | None) -> set[str]:
    """Return the names of parameters that differ from the remembered ones; expect `expected` in each engine, or (None)
    exactly one, the same in all.
    """
    for index, answers in enumerate(engines.probe("compare")):
        different = {name for answer in answers for name in answer}
        if different != expected and (expected is not None or len(different) != 1):
            some = ", ".join(sorted(different)[:5])
            raise RuntimeError(
                f"after our update {len(different)} parameters of engine {index} of {len(engines)} differ from what "
                f"stock SGLang loaded ({some}), expected "
                f"{'one' if expected is None else ', '.join(sorted(expected)) or 'none'}"
            )
        expected = different
    return set() if expected is None else expected
