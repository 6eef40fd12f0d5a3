"""How fast a step was: tokens, seconds, and the floating-point operations that the model needs for them."""

import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tidemill_dataproto import DataProto, ragged

from tidemill_engines.agreement import gather

# Dense bfloat16, in TFLOP/s, as the vendor states it for the SXM or the common variant.
_PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.5,
    "H100": 989.5,
    "H800": 989.5,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Operations of a training step (forward and backward, nothing computed twice), a multiply-add being two.

    Attributes:
        linear: of matrix products with weights.
        attention: of queries with keys and of attention with values, only for pairs of tokens that see each other.
    """

    linear: float
    attention: float

    @property
    def total(self) -> float:
        return self.linear + self.attention


class Meter:
    """What the last step of an engine took and worked on.

    Attributes:
        device: that the engine works on.
        seconds: that the step took.
        peak_memory_bytes: on a GPU the most that was allocated during the step; else the most that this process had.
        lengths: of the step's rows on this rank, in tokens.
        num_outputs: response tokens on this rank.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.seconds = 0.0
        self.peak_memory_bytes = 0
        self.lengths: list[int] = []
        self.num_outputs = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measures what is done within."""
        on_gpu = self.device.type == "cuda"
        self.lengths, self.num_outputs = [], 0
        if on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        started = time.perf_counter()
        yield
        if on_gpu:
            torch.cuda.synchronize(self.device)
        self.seconds = time.perf_counter() - started
        self.peak_memory_bytes = (
            torch.cuda.max_memory_allocated(self.device)
            if on_gpu
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        )

    def count(self, micro_batches: Sequence[DataProto]) -> None:
        """Adds rows, with the ragged columns `input_ids` and `responses`, to the work of the step."""
        for micro_batch in micro_batches:
            self.lengths += ragged.lengths(micro_batch["input_ids"]).tolist()
            self.num_outputs += int(ragged.lengths(micro_batch["responses"]).sum())

    def report(
        self, flops: float, *, ranks_per_row: int, peak_tflops: float | None, group: dist.ProcessGroup
    ) -> dict[str, float]:
        """The numbers of `BaseEngine.performance`. Collective over `group` (gloo), of all ranks.

        Args:
            flops: of this rank's rows.
            ranks_per_row: ranks that share the same rows, which all of them count.
            peak_tflops: of one device; None leaves the share of it out.
        """
        own = self.seconds, sum(self.lengths), flops, self.peak_memory_bytes
        seconds, tokens, operations, memory = (list(column) for column in zip(*gather(own, group), strict=True))
        step_s = max(max(seconds), 1e-9)
        tflops = sum(operations) / ranks_per_row / len(operations) / step_s / 1e12
        metrics = {
            "perf/step_s": step_s,
            "perf/tokens_per_s": sum(tokens) / ranks_per_row / step_s,
            "perf/tflops_per_rank": tflops,
            "perf/peak_memory_gib": max(memory) / (1 << 30),
        }
        return metrics if peak_tflops is None else metrics | {"perf/mfu": tflops / peak_tflops}


def training_flops(model: Any, lengths: Sequence[int], num_outputs: int) -> Flops:
    """The operations of a step of a Hugging Face decoder on rows of `lengths` tokens.

    A weight matrix takes 2 operations per element and token forwards, 2 for the gradient of its input, and 2 for its
    own if it is trained. The head works on response tokens only; of stacked experts, those that a token is sent to.
    What images take in a vision-language model is left out.

    Args:
        model: its parameters may be DTensors or on the meta device.
        num_outputs: response tokens among them.
    """
    config = model.config.get_text_config()
    fields = config.to_dict()
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    head_weight = None if head is None else head.weight
    per_token = 0.0
    for name, param in model.named_parameters():
        if param is head_weight or id(param) in embeddings or param.dim() < 2 or "visual" in name.split("."):
            continue
        share = fields["num_experts_per_tok"] / param.shape[0] if param.dim() == 3 else 1.0
        per_token += param.numel() * share * _operations(param)
    linear = per_token * sum(lengths)
    if head_weight is not None:
        linear += head_weight.numel() * _operations(head_weight) * num_outputs
    windows = _windows(fields)
    pairs = sum(_pairs(length, window) for length in lengths for window in windows)
    width = config.num_attention_heads * fields.get("head_dim", config.hidden_size // config.num_attention_heads)
    return Flops(linear=float(linear), attention=3.0 * 4.0 * width * pairs)


def _operations(weight: torch.Tensor) -> int:
    return 6 if weight.requires_grad else 4


def _windows(fields: dict[str, Any]) -> list[int | None]:
    """For each layer how many tokens a token sees, itself included; None means all before it."""
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    types = fields.get("layer_types")
    if types is None:
        return [window] * fields["num_hidden_layers"]
    return [window if kind == "sliding_attention" else None for kind in types]


def _pairs(length: int, window: int | None) -> int:
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def known_peak_tflops(device: torch.device, dtype: str) -> float | None:
    """The dense bfloat16 peak of a common GPU; None for other devices and dtypes."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)
