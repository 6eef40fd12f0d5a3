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

from tidemill_engines.distributed.agreement import all_gather

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
        self._rows: list[tuple[int, int]] | None = None  # tokens, and response tokens, of the step that is going on

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measures what is done within; a step that fails leaves what is known of the one before it."""
        on_gpu = self.device.type == "cuda"
        rows = self._rows = list[tuple[int, int]]()
        if on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        started = time.perf_counter()
        try:
            yield
        finally:
            self._rows = None
        if on_gpu:
            torch.cuda.synchronize(self.device)
        self.seconds = time.perf_counter() - started
        self.lengths, self.num_outputs = [tokens for tokens, _ in rows], sum(outputs for _, outputs in rows)
        self.peak_memory_bytes = (
            torch.cuda.max_memory_allocated(self.device)
            if on_gpu
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        )

    def count(self, micro_batches: Sequence[DataProto]) -> None:
        """Adds rows, with the ragged columns `input_ids` and `responses`, to the work of a step that is going on."""
        if self._rows is None:
            return
        for micro_batch in micro_batches:
            tokens, outputs = (ragged.lengths(micro_batch[name]).tolist() for name in ("input_ids", "responses"))
            self._rows += zip(tokens, outputs, strict=True)

    def report(
        self, model: Any, *, dtype: str, peak_tflops: float | None, ranks_per_row: int, group: dist.ProcessGroup
    ) -> dict[str, float]:
        """The numbers of `BaseEngine.performance`. Collective over `group` (gloo), of all ranks.

        Args:
            model: as in `training_flops`.
            dtype: that it computes in.
            peak_tflops: of one device in `dtype`; None: as known, and if it is not, the share of it is left out.
            ranks_per_row: ranks that share the same rows, which all of them count.
        """
        flops = training_flops(model, self.lengths, self.num_outputs).total
        own = self.seconds, sum(self.lengths), flops, self.peak_memory_bytes
        seconds, tokens, operations, memory = (list(column) for column in zip(*all_gather(own, group), strict=True))
        step_s = max(max(seconds), 1e-9)
        tflops = sum(operations) / ranks_per_row / len(operations) / step_s / 1e12
        metrics = {
            "perf/step_s": step_s,
            "perf/tokens_per_s": sum(tokens) / ranks_per_row / step_s,
            "perf/tflops_per_rank": tflops,
            "perf/peak_memory_gib": max(memory) / (1 << 30),
        }
        peak = known_peak_tflops(self.device, dtype) if peak_tflops is None else peak_tflops
        return metrics if peak is None else metrics | {"perf/mfu": tflops / peak}


def training_flops(model: Any, lengths: Sequence[int], num_outputs: int) -> Flops:
    """The operations of a step of a Hugging Face decoder on rows of `lengths` tokens.

    A weight matrix takes 2 operations per element and token forwards, 2 for the gradient of its input, and 2 for its
    own if it is trained. The head works on response tokens only; of stacked experts, those that a token is sent to.
    For each pair of tokens, attention takes 12 operations per head and element of it (PaLM, arXiv 2204.02311,
    appendix B): half of them for queries and keys, half for values, which are of another width in latent attention.
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
    return Flops(linear=float(linear), attention=12.0 * config.num_attention_heads * _head_width(fields) * pairs)


def _operations(weight: torch.Tensor) -> int:
    return 6 if weight.requires_grad else 4


def _head_width(fields: dict[str, Any]) -> float:
    """The mean of the widths of a head's queries (and keys) and of its values."""
    if "qk_nope_head_dim" in fields:  # latent attention, whose `head_dim` is that of the rotated part alone
        return (fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"] + fields["v_head_dim"]) / 2
    head_dim = fields.get("head_dim")
    return fields["hidden_size"] // fields["num_attention_heads"] if head_dim is None else head_dim


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
