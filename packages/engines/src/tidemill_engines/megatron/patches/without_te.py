"""Megatron without Transformer Engine or Apex, and with torch's AdamW whatever is installed.

Upstream does:
    1. Use `te_general_gemm` in every MoE router, but define the name only with Transformer Engine
       (`moe_utils.py:1192`).
    2. Copy every entry of the optimizer's state from a checkpoint, including Adam's `step`
       (`DistributedOptimizer._set_main_param_and_optimizer_states`, `distrib_optimizer.py:938`).
    3. Take Adam from Transformer Engine or Apex where one is installed (`optimizer/__init__.py:359`,
       `distrib_optimizer.py:640`).
    4. Import `TELinear` as None without Transformer Engine, and pass it to `isinstance`
       (`multi_latent_attention.py:185`).

Problem:
    1. NameError in the forward of every router without Transformer Engine.
    2. KeyError when a checkpoint is loaded: torch's AdamW keeps `step` in its state, checkpoints do not have it there.
    3. Engine and checkpoints support the state of torch's AdamW only.
    4. TypeError when latent attention (MLA) is built.

Seen in:
    megatron-core 0.16.1; places are those of this version.

Remove when:
    1. `te_general_gemm` is None without Transformer Engine.
    2. `step` is skipped there.
    3. A setting selects torch's AdamW.
    4. `HAVE_TE` is False where `TELinear` is None.
"""

from collections.abc import Callable
from typing import Any

import torch

from tidemill_engines.megatron.patches.monkeypatch import Attributes, Monkeypatch


def _apply(attributes: Attributes) -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if "te_general_gemm" not in vars(moe_utils):
        attributes.replace(moe_utils, "te_general_gemm", None)
    name = "_set_main_param_and_optimizer_states"
    attributes.replace(DistributedOptimizer, name, _without_step(getattr(DistributedOptimizer, name)))
    attributes.replace(optimizer, "USING_PYTORCH_OPTIMIZER", True)
    attributes.replace(distrib_optimizer, "HAVE_APEX_OR_TE", False)
    if not isinstance(multi_latent_attention.TELinear, type):
        attributes.replace(multi_latent_attention, "HAVE_TE", False)


def _without_step(real: Callable[..., None]) -> Callable[..., None]:
    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        state = self.optimizer.state[main_param]
        if "step" not in state:
            real(self, model_param, tensors)
            return
        with torch.no_grad():
            for name, target in {"param": main_param, **state}.items():
                if name != "step":
                    target.copy_(tensors[name])

    return set_states


without_te = Monkeypatch(_apply)
"""Context in which Megatron does not need Transformer Engine and uses torch's AdamW."""
