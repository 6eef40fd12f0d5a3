"""Places in which megatron-core 0.16 takes Transformer Engine for granted, or for wanted where it is installed.

Nothing happens at import. `closed_gaps()` is a context in which they are closed, on any device, and also
where layers are made of Transformer Engine: what it changes is beside them. Places are those of megatron-core 0.16.1.

- `te_general_gemm` is None: the name is undefined otherwise, so every router fails (`moe_utils.py:1192`).
- Adam's `step` is left alone where parameter and moments are set: torch's AdamW keeps it with them, and looking it up
  fails (`distrib_optimizer.py:938`).
- AdamW is torch's, whatever is installed: engine and checkpoints know its state (`optimizer/__init__.py:359`,
  `distrib_optimizer.py:640`).
- `CheckpointWithoutOutput`, which computes norms again, takes `fp8=False` for True (`tensor_parallel/random.py:636`).
- Linear layers that add gradients in their products take the kernel for it from Apex (`layers.py:569`); torch has one.
- `HAVE_TE` of latent attention is False: it finds names of Transformer Engine that stand for no layer, and asks
  whether a layer is one (`multi_latent_attention.py:185`).
"""

from collections.abc import Callable
from typing import Any

import torch

from tidemill_engines.megatron.patches.monkeypatch import Changes, Redirection
from tidemill_engines.megatron.patches.weight_gradients import WeightGradients


def _close(changes: Changes) -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import layers
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if "te_general_gemm" not in vars(moe_utils):
        changes.set(moe_utils, "te_general_gemm", None)
    name = "_set_main_param_and_optimizer_states"
    changes.set(DistributedOptimizer, name, _without_step(getattr(DistributedOptimizer, name)))
    changes.set(optimizer, "USING_PYTORCH_OPTIMIZER", True)
    changes.set(distrib_optimizer, "HAVE_APEX_OR_TE", False)
    changes.set(layers, "fused_weight_gradient_mlp_cuda", WeightGradients)
    if not isinstance(multi_latent_attention.TELinear, type):
        changes.set(multi_latent_attention, "HAVE_TE", False)
    make: Any = CheckpointWithoutOutput.__init__
    changes.set(CheckpointWithoutOutput, "__init__", lambda self: make(self, fp8=None))


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


closed_gaps = Redirection(_close)
