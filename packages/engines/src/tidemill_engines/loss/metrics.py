"""Metrics of a loss, and their reduction over micro-batches and ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from tidemill_engines.distributed.agreement import all_gather, describe_error, raise_first_error

Kind = Literal["sum", "mean", "max", "min"]
Reduced = tuple[Kind, float, float]
"""Kind, value and weight of a metric over some micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Metric:
    """A number of a micro-batch that can be reduced to that of the global batch.

    Create it with `Metric.sum`, `mean`, `max` or `min`. A mean, maximum or minimum over no element is 0.

    Attributes:
        kind: reduction: "sum" adds values, "mean" divides the sum of values by the sum of weights, "max" and "min"
            compare values.
        value: 0-d value.
        weight: 0-d count or sum of weights; if it is 0, `value` is ignored.
    """

    kind: Kind
    value: torch.Tensor
    weight: torch.Tensor

    @staticmethod
    def sum(value: torch.Tensor) -> "Metric":
        """Create a metric that is summed, such as a term of the loss that is divided by the normalizer already."""
        return Metric(kind="sum", value=value, weight=torch.ones_like(value))

    @staticmethod
    def mean(values: torch.Tensor, weights: torch.Tensor) -> "Metric":
        """Create the mean of `values` over the global batch, weighted, for example by the mask (of the same shape).

        A value with weight 0 is ignored, even if it is NaN.
        """
        weighted = torch.where(weights != 0, values * weights, torch.zeros_like(values))
        return Metric(kind="mean", value=weighted.sum(), weight=weights.sum())

    @staticmethod
    def max(values: torch.Tensor, mask: torch.Tensor) -> "Metric":
        """Create the maximum of `values` where `mask`, of the same shape, is not 0."""
        return _extreme("max", values, mask, -math.inf)

    @staticmethod
    def min(values: torch.Tensor, mask: torch.Tensor) -> "Metric":
        """Create the minimum of `values` where `mask`, of the same shape, is not 0."""
        return _extreme("min", values, mask, math.inf)

    def detach(self) -> "Metric":
        return Metric(kind=self.kind, value=self.value.detach(), weight=self.weight.detach())


def _extreme(kind: Literal["max", "min"], values: torch.Tensor, mask: torch.Tensor, neutral: float) -> Metric:
    values = values if values.is_floating_point() else values.double()
    counted = torch.where(mask != 0, values, torch.full_like(values, neutral)).flatten()
    counted = torch.cat([counted, counted.new_full((1,), neutral)])  # max() of an empty tensor is an error
    return Metric(kind=kind, value=counted.max() if kind == "max" else counted.min(), weight=(mask != 0).sum())


def as_metrics(reported: Mapping[str, "torch.Tensor | Metric"]) -> dict[str, Metric]:
    """Return the metrics of a loss, detached; a plain 0-d tensor becomes a sum."""
    return {
        name: (value if isinstance(value, Metric) else Metric.sum(value)).detach() for name, value in reported.items()
    }


def reduce_metrics(reports: Sequence[Mapping[str, Metric]], group: dist.ProcessGroup, part: int) -> dict[str, float]:
    """Reduce the metrics of micro-batches over micro-batches and ranks, in float64 and in rank order. Collective.

    Args:
        reports: metrics of each micro-batch of this rank.
        group: gloo group of all ranks.
        part: data-parallel rank; of several ranks with the same one, the first is counted.

    Raises:
        ValueError: a metric is not 0-d, or micro-batches or ranks report different names or kinds; on every rank.
    """
    own: dict[str, Reduced] = {}
    error = None
    try:
        own = _reduce_here(reports)
    except ValueError as caught:
        error = caught
    of_ranks = all_gather((describe_error(error), part, own), group)
    raise_first_error([described for described, _, _ in of_ranks], error)
    first = _kinds(of_ranks[0][2])
    parts: dict[int, dict[str, Reduced]] = {}
    for rank, (_, its_part, report) in enumerate(of_ranks):
        if _kinds(report) != first:
            raise ValueError(
                f"the loss reported {sorted(first)} on rank 0 but {sorted(report)} on rank {rank}; "
                "it must report the same metrics for every micro-batch"
            )
        parts.setdefault(its_part, report)
    return {name: _finish(_combine(report[name] for report in parts.values())) for name in first}


def _reduce_here(reports: Sequence[Mapping[str, Metric]]) -> dict[str, Reduced]:
    kinds = {name: metric.kind for name, metric in reports[0].items()}
    for report in reports:
        if {name: metric.kind for name, metric in report.items()} != kinds:
            raise ValueError(
                f"the loss reported {sorted(kinds)} for the first micro-batch but {sorted(report)} for another; "
                "it must report the same metrics for every micro-batch"
            )
        for name, metric in report.items():
            if metric.value.dim() or metric.weight.dim():
                raise ValueError(
                    f"metric {name} must be 0-d, got shape {tuple(metric.value.shape)}; reduce it in the loss, for "
                    "example with Metric.mean(values, mask)"
                )
    flat = [
        number.double() for report in reports for metric in report.values() for number in (metric.value, metric.weight)
    ]
    numbers = iter(torch.stack([number.to(flat[0].device) for number in flat]).tolist() if flat else [])  # one transfer
    of_batches: list[dict[str, Reduced]] = [
        {name: (metric.kind, next(numbers), next(numbers)) for name, metric in report.items()} for report in reports
    ]
    return {name: _combine(report[name] for report in of_batches) for name in kinds}


def _kinds(report: Mapping[str, Reduced]) -> dict[str, Kind]:
    return {name: kind for name, (kind, _, _) in report.items()}


def _combine(items: Iterable[Reduced]) -> Reduced:
    kinds, values, weights = zip(*items, strict=True)
    weight = math.fsum(weights)
    if kinds[0] != "sum" and 0 in weights:
        values = [value for value, own in zip(values, weights, strict=True) if own != 0] or [0.0]
    if kinds[0] in ("sum", "mean"):
        # fsum does not depend on the order, but raises on infinities
        return kinds[0], math.fsum(values) if all(map(math.isfinite, values)) else sum(values), weight
    if any(map(math.isnan, values)):  # max() and min() would ignore NaN depending on the order
        return kinds[0], math.nan, weight
    return kinds[0], max(values) if kinds[0] == "max" else min(values), weight


def _finish(item: Reduced) -> float:
    kind, value, weight = item
    if kind == "sum":
        return value
    if weight == 0:
        return 0.0
    return value / weight if kind == "mean" else value
