"""Selective recomputation without FP8.

Upstream does:
    `CheckpointWithoutOutput(fp8=False)`, which recomputes norms in the backward, stores `fp8 is not None`
    (`tensor_parallel/random.py:637`), so False counts as FP8.

Problem:
    The recomputation then opens contexts of Transformer Engine, and fails where that is not installed. Norms cannot be
    recomputed.

Seen in:
    megatron-core 0.16.1

Remove when:
    `CheckpointWithoutOutput(fp8=False)` does not use FP8.
"""

from typing import Any

from tidemill_engines.megatron.patches.monkeypatch import Attributes, Monkeypatch


def _apply(attributes: Attributes) -> None:
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    init: Any = CheckpointWithoutOutput.__init__
    attributes.replace(CheckpointWithoutOutput, "__init__", lambda self: init(self, fp8=None))


checkpoint_without_output = Monkeypatch(_apply)
"""Context in which norms are recomputed without FP8."""
