"""The benchmark cases."""

from dataclasses import dataclass, replace
from typing import Any

from weight_update.megatron import MegatronLayout
from weight_update.shapes import DENSE, MOE, TINY

FLATTENED = "stock flattened bucket"
UPDATE_WEIGHTS = "SGLang update_weights"
DISTRIBUTED = "stock distributed, flattened bucket"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model, one trainer and its engines.

    Attributes:
        config: Hugging Face config of the model.
        num_trainers: number of trainer ranks. One rank holds plain parameters, several hold FSDP2 shards, unless
            `layout` is set.
        layout: Megatron layout over all trainer ranks.
        tp_size: tensor-parallel size of each engine.
        num_engines: number of engines, on consecutive GPUs. Several share the GPUs of the trainer, one trainer rank for
            each engine rank.
        separate: whether the engine has its own GPUs, after those of the trainer.
        is_fp8: whether the engine's matrices are in block-wise float8; the trainer's are in bfloat16.
        device: "cuda" or "cpu".
        buckets: sizes of the stock batches and buckets in bytes; the second is used for the comparison.
        to_beat: method that our update is compared with, at the second bucket size.
        speedup: target factor of the speedup over `to_beat`.
        floor_ratio: target ratio of our time to the lower bound. Cases of two GPUs have the targets of four.
    """

    name: str
    config: dict[str, Any]
    num_trainers: int = 1
    layout: MegatronLayout | None = None
    tp_size: int = 1
    num_engines: int = 1
    separate: bool = False
    is_fp8: bool = False
    device: str = "cuda"
    buckets: tuple[int, ...] = (128 << 20, 512 << 20, 2048 << 20)
    to_beat: str = FLATTENED
    speedup: float
    floor_ratio: float

    def __post_init__(self) -> None:
        num_ranks = self.num_engines * self.tp_size
        if self.num_engines > 1 and (self.separate or self.num_trainers != num_ranks):
            raise ValueError(
                f"{self.name}: several engines must share the trainer's GPUs, one trainer rank for each of their "
                f"{num_ranks} ranks, got num_trainers={self.num_trainers}, separate={self.separate}"
            )

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def num_gpus(self) -> int:
        if not self.is_cuda:
            return 0
        num_ranks = self.num_engines * self.tp_size
        return self.num_trainers + num_ranks if self.separate else max(self.num_trainers, num_ranks)

    def tiny(self) -> "Case":
        """Return the same case on CPUs: at most two trainer ranks and two engine ranks, a dense model in bfloat16
        (SGLang supports neither MoE nor float8 on CPUs), small buckets.
        """
        return replace(
            self,
            name=f"{self.name} (tiny)",
            config=TINY,
            num_trainers=min(self.num_trainers, 2),
            layout=None if self.layout is None else MegatronLayout(tp=2, ep=1),
            tp_size=min(self.tp_size, 2 // self.num_engines),
            device="cpu",
            buckets=(32 << 10, 128 << 10, 512 << 10),
            is_fp8=False,
            to_beat=FLATTENED
            if self.to_beat == UPDATE_WEIGHTS
            else self.to_beat,  # update_weights cannot send from a CPU
        )


_DENSE1 = Case(name="dense1", config=DENSE, speedup=5, floor_ratio=2.5)
_MOE4 = Case(name="moe4", config=MOE, num_trainers=4, tp_size=4, to_beat=UPDATE_WEIGHTS, speedup=10, floor_ratio=4)
_MOE8 = replace(_MOE4, name="moe8", num_trainers=8, num_engines=2)
_MOE2 = replace(_MOE4, name="moe2", num_trainers=2, tp_size=2)

CASES = {
    case.name: case
    for case in (
        Case(name="moe1", config=MOE, speedup=20, floor_ratio=2),
        _DENSE1,
        replace(_DENSE1, name="dense1_fp8", is_fp8=True, floor_ratio=3 * 1.7),
        replace(_DENSE1, name="moe1_fp8", config=MOE, is_fp8=True, floor_ratio=3 * 1.6),
        _MOE2,
        replace(_MOE2, name="dense2", config=DENSE),
        replace(_MOE2, name="dense2e2", config=DENSE, tp_size=1, num_engines=2),
        _MOE4,
        _MOE8,
        replace(_MOE4, name="megatron4", layout=MegatronLayout(tp=2, ep=2)),
        Case(
            name="dense2x2",
            config=DENSE,
            num_trainers=2,
            tp_size=2,
            separate=True,
            to_beat=DISTRIBUTED,
            speedup=5,
            floor_ratio=4,
        ),
        replace(_DENSE1.tiny(), name="tiny"),
    )
}
