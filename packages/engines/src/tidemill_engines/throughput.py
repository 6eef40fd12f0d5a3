"""Speed of a training step: tokens, seconds, and the floating-point operations that the model requires."""

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tidemill_dataproto import DataProto, ragged

from tidemill_engines.distributed.agreement import all_gather

# Dense bfloat16 TFLOP/s, from the data sheet of the SXM or the common variant.
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
    """Operations of a training step (forward and backward, without recomputation); a multiply-add counts as two.

    Attributes:
        linear: operations of matrix products with weights.
        attention: operations of queries with keys and of scores with values, for pairs of tokens that are not masked.
    """

    linear: float
    attention: float

    @property
    def total(self) -> float:
        return self.linear + self.attention


class Meter:
    """Measurement of the last step of an engine.

    Args:
        clock: returns the time in seconds.

    Attributes:
        device: device of the engine.
        seconds: duration of the step.
        peak_memory_bytes: on a GPU the peak of allocated memory during the step; else the peak RSS of the process.
        lengths: lengths of the step's rows on this rank, in tokens.
        num_outputs: number of response tokens on this rank.
        parts: seconds of each part of the step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.device = torch.device("cpu")
        self.seconds = 0.0
        self.peak_memory_bytes = 0
        self.lengths: list[int] = []
        self.num_outputs = 0
        self.parts: dict[str, float] = {}
        self._marks: list[tuple[str, Any, Any]] = []  # name, start and end of each part of the current step
        self._rows: list[tuple[int, int]] | None = None  # tokens and response tokens of each row of the current step

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the step within the context; a failed step keeps the measurement of the previous one."""
        on_gpu = self.device.type == "cuda"
        rows = self._rows = list[tuple[int, int]]()
        marks = self._marks = []
        if on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        started = self._clock()
        try:
            yield
        finally:
            self._rows = None
        if on_gpu:
            torch.cuda.synchronize(self.device)
        self.seconds = self._clock() - started
        self.parts = {}
        for name, start, end in marks:
            seconds = start.elapsed_time(end) / 1000 if on_gpu else end - start
            self.parts[name] = self.parts.get(name, 0.0) + seconds
        self.lengths, self.num_outputs = [tokens for tokens, _ in rows], sum(outputs for _, outputs in rows)
        self.peak_memory_bytes = (
            torch.cuda.max_memory_allocated(self.device)
            if on_gpu
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        )

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part of the current step, if there is one. On a GPU events measure it, without waiting for them."""
        if self._rows is None:
            yield
            return
        start = self._mark()
        yield
        self._marks.append((name, start, self._mark()))

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def count(self, micro_batches: Sequence[DataProto]) -> None:
        """Add rows, with the ragged columns `input_ids` and `responses`, to the current step, if there is one."""
        if self._rows is None:
            return
        for micro_batch in micro_batches:
            tokens, outputs = (ragged.lengths(micro_batch[name]).tolist() for name in ("input_ids", "responses"))
            self._rows += zip(tokens, outputs, strict=True)

    def report(
        self, model: Any, *, dtype: str, peak_tflops: float | None, ranks_per_row: int, group: dist.ProcessGroup
    ) -> dict[str, float]:
        """Return the numbers of `BaseEngine.performance`. Collective over `group` (gloo, all ranks).

        Args:
            model: model of `training_flops`.
            dtype: dtype of the computation.
            peak_tflops: peak of one device in `dtype`; None uses the known value of common GPUs.
            ranks_per_row: number of ranks that share, and count, the same rows.
        """
        flops = training_flops(model, self.lengths, self.num_outputs).total
        own = self.seconds, sum(self.lengths), flops, self.peak_memory_bytes, self.parts
        gathered = zip(*all_gather(own, group), strict=True)
        seconds, tokens, operations, memory, parts = (list(column) for column in gathered)
        step_s = max(max(seconds), 1e-9)
        names = sorted({name for each in parts for name in each})
        tflops = sum(operations) / ranks_per_row / len(operations) / step_s / 1e12
        metrics = {
            **{f"perf/{name}_s": sum(each.get(name, 0.0) for each in parts) / len(parts) for name in names},
            "perf/step_s": step_s,
            "perf/tokens_per_s": sum(tokens) / ranks_per_row / step_s,
            "perf/tflops_per_rank": tflops,
            "perf/peak_memory_gib": max(memory) / (1 << 30),
        }
        peak = known_peak_tflops(self.device, dtype) if peak_tflops is None else peak_tflops
        return metrics if peak is None else metrics | {"perf/mfu": tflops / peak}


def training_flops(model: Any, lengths: Sequence[int], num_outputs: int) -> Flops:
    """Count the operations of a step of a Hugging Face decoder on rows of `lengths` tokens.

    A weight matrix requires 2 operations per element and token in the forward pass, 2 for the gradient of its input,
    and 2 for its own gradient if it is trained. The head computes response tokens only; stacked experts count only for
    the tokens that they process. Attention requires 12 operations per pair of tokens, head and element of the head
    (PaLM, arXiv 2204.02311, appendix B): half for queries and keys, half for values, whose width differs in MLA. The
    vision part of a vision-language model is not counted.

    Args:
        model: transformers model; its parameters may be DTensors or on the meta device.
        lengths: number of tokens of each row.
        num_outputs: number of response tokens.
    """
    config = model.config.get_text_config()
    fields = config.to_dict()
    fields |= {name: fields[own] for name, own in config.attribute_map.items() if own in fields}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    head_weight = None if head is None else head.weight
    per_token = 0.0
    for name, param in model.named_parameters():
        if param is head_weight or id(param) in embeddings or param.dim() < 2 or "visual" in name.split("."):
            continue
        num_copies = fields.get("num_experts_per_tok") if param.dim() == 3 else None  # of a token, for stacked experts
        share = 1.0 if num_copies is None else num_copies / param.shape[0]
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
    """Return the mean of the widths of a head's queries (and keys) and of its values."""
    if "qk_nope_head_dim" in fields:  # MLA, where `head_dim` is the width of the rotary part only
        return (fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"] + fields["v_head_dim"]) / 2
    head_dim = fields.get("head_dim")
    return fields["hidden_size"] // fields["num_attention_heads"] if head_dim is None else head_dim


def _windows(fields: dict[str, Any]) -> list[int | None]:
    """Return for each layer the number of tokens that a token attends to, including itself; None is all before it."""
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
    """Return the dense bfloat16 peak of a common GPU; None for other devices and dtypes."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)
