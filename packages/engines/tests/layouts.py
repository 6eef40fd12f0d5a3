"""The layouts of each engine, as combinations of factors."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import combinations, product
from typing import Any

from tidemill_engines.config import LoraConfig

Layout = dict[str, Any]

LORA = LoraConfig(rank=3, alpha=8.0, target_modules=("q_proj", "v_proj"))  # 3 rows, for 1 to 8 ranks
_BATCHES = {"micro": [1, 3, "dynamic"], "form": ["ragged", "padded"], "rows": ["in order", "mixed"]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """The layouts of one backend.

    Attributes:
        factors: names and values.
        is_possible: whether a combination makes sense.
        settings: what it means for `build_engine`.
        world_size: how many ranks it takes.
        overrides: fields of the models' configuration.
        grid: factors of which each combination is a test of its own when all layouts are run, with the others fixed
            as in `fixed`.
    """

    factors: dict[str, list[Any]]
    is_possible: Callable[[Layout], bool]
    settings: Callable[[Layout], dict[str, Any]]
    world_size: Callable[[Layout], int]
    overrides: dict[str, Any]
    grid: tuple[str, ...]
    fixed: Layout

    def all_layouts(self) -> list[Layout]:
        layouts = (dict(zip(self.factors, values, strict=True)) for values in product(*self.factors.values()))
        return [layout for layout in layouts if self.is_possible(layout)]

    def pairwise_layouts(self) -> list[Layout]:
        """Select few layouts that contain all possible pairs of values, greedily."""

        def pairs(layout: Layout) -> set[Any]:
            return set(combinations(layout.items(), 2))

        candidates = [(layout, pairs(layout)) for layout in self.all_layouts()]
        missing = set().union(*(has for _, has in candidates))
        chosen = []
        while missing:
            layout, has = max(candidates, key=lambda candidate: len(candidate[1] & missing))
            chosen.append(layout)
            missing -= has
        return chosen


def _sizes_of_batches(layout: Layout) -> dict[str, Any]:
    by_tokens = layout["micro"] == "dynamic"
    return {
        "micro_batch_size_per_gpu": None if by_tokens else layout["micro"],
        "max_token_len_per_gpu": 30 if by_tokens else 1000,
    }


def _fsdp2_settings(layout: Layout) -> dict[str, Any]:
    return _sizes_of_batches(layout) | {
        "ulysses_sequence_parallel_size": layout["sp"],
        "fsdp_size": layout["dp"] * layout["sp"] // 2 if layout["sharding"] == "HSDP" else -1,
        "reshard_after_forward": layout["sharding"] != "ZeRO-2",
        "model": {
            "gradient_checkpointing": layout["recompute"],
            "lora": LORA if layout["tuning"] == "LoRA" else None,
        },
    }


FSDP2 = Suite(
    factors={
        "dp": [1, 2, 4],
        "sp": [1, 2],
        "sharding": ["ZeRO-3", "ZeRO-2", "HSDP"],
        **_BATCHES,
        "recompute": [False, True],
        "tuning": ["full", "LoRA"] if find_spec("peft") else ["full"],
        "family": ["qwen3 tied", "qwen2 tied", "qwen2", "llama tied", "llama", "qwen3_moe"],
    },
    # HSDP requires at least two ranks
    is_possible=lambda layout: layout["sharding"] != "HSDP" or layout["dp"] * layout["sp"] > 1,
    settings=_fsdp2_settings,
    world_size=lambda layout: layout["dp"] * layout["sp"],
    overrides={},
    grid=("dp", "sp", "family"),
    fixed={"recompute": False},
)


def _is_possible_with_megatron(layout: Layout) -> bool:
    """Run all layouts on four ranks."""
    has_experts = layout["family"] == "qwen3_moe"
    return (
        layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"] == 4
        and (layout["vpp"] == 1 or layout["pp"] > 1)
        and (not layout["sp"] or layout["tp"] > 1)
        and (layout["ep"] == 1 or has_experts)
        and (layout["sp"] or layout["tp"] == 1 or not has_experts)
    )


def _megatron_settings(layout: Layout) -> dict[str, Any]:
    return _sizes_of_batches(layout) | {
        "tensor_model_parallel_size": layout["tp"],
        "pipeline_model_parallel_size": layout["pp"],
        "virtual_pipeline_model_parallel_size": layout["vpp"] if layout["vpp"] > 1 else None,
        "context_parallel_size": layout["cp"],
        "expert_model_parallel_size": layout["ep"],
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": layout["sp"],
        "use_distributed_optimizer": layout["optimizer"] == "distributed",
        "overlap_grad_reduce": layout["gradients"] == "overlapped",
        "model": {},
    }


MEGATRON = Suite(
    factors={
        "tp": [1, 2],
        "pp": [1, 2],
        "vpp": [1, 2],
        "cp": [1, 2],
        "ep": [1, 2],
        "dp": [1, 2, 4],
        "sp": [False, True],
        "optimizer": ["distributed", "whole"],
        "gradients": ["at the end", "overlapped"],
        **_BATCHES,
        "tuning": ["full"],
        "family": ["qwen3", "qwen2 tied", "llama", "qwen3_moe"],
    },
    is_possible=_is_possible_with_megatron,
    settings=_megatron_settings,
    world_size=lambda layout: 4,
    overrides={"num_hidden_layers": 4},
    grid=("family", "micro"),
    fixed={"rows": "mixed"},
)

SUITES = {"fsdp2": FSDP2, "megatron": MEGATRON}
