"""Engines whose ranks are threads: each is a `Receiver` with a small model that loads weights as SGLang's models do."""

import threading
from collections.abc import Callable, Mapping

import torch
from engine_state import LoaderState
from tidemill_weight_update import Request
from tidemill_weight_update.receive.receiver import Receiver
from torch import Tensor, nn

ATTN, MLP = "layers.0.self_attn", "layers.0.mlp"
HIDDEN, KV_ROWS, EXPERTS, VOCAB, PADDED_VOCAB = 8, 2, 4, 10, 12
SHAPES = {
    "embed.weight": (VOCAB, HIDDEN),
    f"{ATTN}.q_proj.weight": (8, HIDDEN),
    f"{ATTN}.k_proj.weight": (KV_ROWS, HIDDEN),
    f"{ATTN}.v_proj.weight": (KV_ROWS, HIDDEN),
    f"{ATTN}.o_proj.weight": (HIDDEN, 8),
    f"{ATTN}.q_proj.bias": (8,),
    **{f"{MLP}.experts.{e}.{part}.weight": (4, HIDDEN) for e in range(EXPERTS) for part in ("gate", "up")},
    "norm.weight": (HIDDEN,),
    "temperature": (),
}
TIED = "lm_head.weight"


class ToyModel(nn.Module):
    """One tensor-parallel rank of a model with fused projections sharded by rows, one projection sharded by columns,
    replicated kv heads, expert parallelism, a padded vocabulary, a tensor that is cast and a scalar."""

    def __init__(self, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.kv_rows = max(1, KV_ROWS // size)

        def parameter(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, 7.0, dtype=dtype), requires_grad=False)

        self.embed = parameter(PADDED_VOCAB // size, HIDDEN)
        self.qkv = parameter(8 // size + 2 * self.kv_rows, HIDDEN)
        self.q_bias = parameter(8 // size)
        self.o = parameter(HIDDEN, 8 // size)
        self.experts = parameter(EXPERTS // size, 8, HIDDEN)
        self.norm = parameter(HIDDEN, dtype=torch.float32)
        self.temperature = parameter(dtype=torch.float32)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.load_one(name, tensor)

    def load_one(self, name: str, tensor: Tensor) -> None:
        rank, size = self.rank, self.size
        if name.startswith(ATTN):
            self._load_attention(name, tensor)
        elif name.startswith(f"{MLP}.experts."):
            expert, part = name.removeprefix(f"{MLP}.experts.").split(".")[:2]
            local = int(expert) - rank * (EXPERTS // size)
            if 0 <= local < EXPERTS // size:
                self.experts.data[local].narrow(0, 4 * (part == "up"), 4).copy_(tensor)
        elif name == "embed.weight":
            rows = PADDED_VOCAB // size
            held = max(0, min(rows, VOCAB - rank * rows))
            self.embed.data[:held].copy_(tensor.narrow(0, min(rank * rows, VOCAB), held))
            self.embed.data[held:].fill_(0)
        elif name == "norm.weight":
            self.norm.data.copy_(tensor)
        elif name == "temperature":
            self.temperature.data.copy_(tensor)
        # Other names are ignored without an error, as in SGLang's models.

    def _load_attention(self, name: str, tensor: Tensor) -> None:
        part = name.removeprefix(ATTN + ".")
        rows = 8 // self.size
        kv_start = self.rank * KV_ROWS // self.size
        if part == "q_proj.weight":
            self.qkv.data[:rows].copy_(tensor.narrow(0, self.rank * rows, rows))
        elif part in ("k_proj.weight", "v_proj.weight"):
            start = rows + self.kv_rows * (part[0] == "v")
            self.qkv.data.narrow(0, start, self.kv_rows).copy_(tensor.narrow(0, kv_start, self.kv_rows))
        elif part == "q_proj.bias":
            self.q_bias.data.copy_(tensor.narrow(0, self.rank * rows, rows))
        elif part == "o_proj.weight":
            self.o.data.copy_(tensor.narrow(1, self.rank * rows, rows))


class ToyEngine(LoaderState):
    """`EngineClient` whose ranks are threads of this process.

    Args:
        tp_size: number of ranks.
        name: name in messages.
        model: function that makes the model of a rank.
        receiver: class of the receivers.
    """

    def __init__(
        self,
        tp_size: int = 1,
        name: str = "toy",
        model: Callable[[int, int], nn.Module] = ToyModel,
        receiver: type[Receiver] = Receiver,
    ) -> None:
        super().__init__(name, tp_size)
        self.models = [model(rank, tp_size) for rank in range(tp_size)]
        self.receivers = [
            receiver(model, rank, tp_size, lambda name: name == TIED, lambda: self.calls.append("finish"))
            for rank, model in enumerate(self.models)
        ]
        self.requests: list[Request] = []

    def load(self, request: Request, *, flush_cache: bool) -> None:
        self.calls.append("load, flush" if flush_cache else "load")
        self.requests.append(request)
        threads = [threading.Thread(target=receiver.handle, args=(request,)) for receiver in self.receivers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Checkpoint for `ToyModel`; a cast to bfloat16 rounds its values."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def state(engine: ToyEngine) -> list[dict[str, Tensor]]:
    """Copy of the parameters of each rank."""
    return [{name: p.detach().clone().cpu() for name, p in model.named_parameters()} for model in engine.models]


def freshly_loaded(engine: ToyEngine, checkpoint: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Parameters of the ranks of such an engine after a load with `load_weights`."""
    fresh = ToyEngine(engine.tp_size, model=lambda rank, size: type(engine.models[0])(rank, size))
    for model in fresh.models:
        model.load_weights(checkpoint.items())  # type: ignore[operator]
    return state(fresh)


def same(left: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> bool:
    """Whether both are bitwise equal, including NaN."""
    return len(left) == len(right) and all(
        a.keys() == b.keys()
        and all(
            a[n].dtype == b[n].dtype and a[n].view(-1).view(torch.uint8).equal(b[n].view(-1).view(torch.uint8))
            for n in a
        )
        for a, b in zip(left, right, strict=True)
    )


def holds(engine: ToyEngine, checkpoint: Mapping[str, Tensor]) -> bool:
    """Whether the parameters are bitwise equal to those after a fresh load of the checkpoint."""
    return same(state(engine), freshly_loaded(engine, checkpoint))


MODES = ["collection", "function"]


def as_mode(checkpoint: dict[str, Tensor], mode: str):
    """Pass the tensors to `update` as a collection, or as a function that makes temporary ones."""
    if mode == "collection":
        return checkpoint.items()
    return lambda: ((name, tensor.clone()) for name, tensor in checkpoint.items())
