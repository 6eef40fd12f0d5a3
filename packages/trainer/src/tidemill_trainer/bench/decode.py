"""The memory that decoding reads, against the bandwidth of the GPUs."""

from collections.abc import Mapping
from typing import Any

from tidemill_trainer.config import Config
from tidemill_trainer.plan.engine import ITEM_BYTES
from tidemill_trainer.plan.model import ModelSizes
from tidemill_trainer.plan.phases import engine_ranks, kv_cache_token_bytes

# Bytes per second, from the data sheet of the SXM variant; the others have less, or another memory.
_PEAK_BANDWIDTH = {"B200": 8.0e12, "H200": 4.8e12, "H100": 3.35e12, "H800": 3.35e12, "A100": 2.039e12}
_OTHER_VARIANTS = ("PCI", "NVL", "GH200", "GB200", "40GB")


def peak_bandwidth(gpu: str | None) -> float | None:
    """Return the bytes per second of a common GPU; None for another one, or without one."""
    if gpu is None or any(variant in gpu for variant in _OTHER_VARIANTS):
        return None
    return next((peak for part, peak in _PEAK_BANDWIDTH.items() if part in gpu), None)


def decode_bytes(config: Config, model: ModelSizes, metrics: Mapping[str, Any], num_generated: float) -> float:
    """Return the bytes of weights and KV cache that all engines together read to decode the responses of a step.

    Each engine reads its weights once for each token of the longest response, which is the least possible number of
    times; more often if the KV pool has no room for all responses. For each token of a response, it reads the keys and
    values of all tokens before. Of the experts of a MoE model, it reads those that a batch of independent tokens hits.

    Args:
        config: configuration of the run.
        model: sizes of the model.
        metrics: line of `metrics.jsonl`.
        num_generated: tokens that were sampled in the step.
    """
    element = ITEM_BYTES[config.rollout.dtype]
    mean, std = metrics["response_length/mean"], metrics["response_length/std"]
    num_responses, engines = num_generated / max(mean, 1.0), config.rollout.num_engines
    read = model.total - (0 if model.has_tied_head else model.embedding)
    if model.num_copies:
        missed = (1 - model.num_copies / model.num_experts) ** (num_responses / engines)
        read -= model.experts * missed
    in_layers = read - model.embedding  # the head has the size of the embedding
    read_bytes = model.embedding * element + in_layers * (1 if config.rollout.quantization == "fp8" else element)
    weights = engines * metrics["response_length/max"] * read_bytes
    positions = metrics["prompt_length/mean"] * mean + (std**2 + mean**2 + mean) / 2  # of a response, summed up
    return weights + num_responses * positions * kv_cache_token_bytes(config, model) * engine_ranks(config)
