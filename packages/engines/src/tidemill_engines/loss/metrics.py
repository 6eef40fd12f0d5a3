"""Numbers that a loss reports, and how those of micro-batches become that of the global batch."""

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
    """One number about a micro-batch, with all that it takes to get the number of the global batch from it.

    Made by `Metric.sum`, `mean`, `max` and `min`. Where nothing was counted, a mean, largest or smallest value is 0.

    Attributes:
        kind: "sum" adds values up, "mean" divides the sum of values by that of weights, "max" and "min" compare.
        value: 0-d.
        weight: 0-d, what was counted; 0 leaves `value` out.
    """

    kind: Kind
    value: torch.Tensor
    weight: torch.Tensor

    @staticmethod
    def sum(value: torch.Tensor) -> "Metric":
        """A share [] that is added up, such as a term of the loss, which a normalizer has divided already."""
        return Metric(kind="sum", value=value, weight=torch.ones_like(value))

    @staticmethod
    def mean(values: torch.Tensor, weights: torch.Tensor) -> "Metric":
        """The mean of `values` over the global batch, weighted, for example by the mask (both of one shape).

        A value whose weight is 0 is left out, whatever it is.
        """
        weighted = torch.where(weights != 0, values * weights, torch.zeros_like(values))
        return Metric(kind="mean", value=weighted.sum(), weight=weights.sum())

    @staticmethod
    def max(values: torch.Tensor, mask: torch.Tensor) -> "Metric":
        """The largest of the `values` where the `mask`, of the same shape, is not 0."""
        return _extreme("max", values, mask, -math.inf)

    @staticmethod
    def min(values: torch.Tensor, mask: torch.Tensor) -> "Metric":
        """The smallest of the `values` where the `mask`, of the same shape, is not 0."""
        return _extreme("min", values, mask, math.inf)

    def detach(self) -> "Metric":
        return Metric(kind=self.kind, value=self.value.detach(), weight=self.weight.detach())


def _extreme(kind: Literal["max", "min"], values: torch.Tensor, mask: torch.Tensor, neutral: float) -> Metric:
    counted = torch.where(mask != 0, values, torch.full_like(values, neutral)).flatten()
    counted = torch.cat([counted, counted.new_full((1,), neutral)])  # so that no token at all is no special case
    return Metric(kind=kind, value=counted.max() if kind == "max" else counted.min(), weight=(mask != 0).sum())


def as_metrics(reported: Mapping[str, "torch.Tensor | Metric"]) -> dict[str, Metric]:
    """What a loss reported, detached; a plain 0-d tensor is a share that is added up."""
    return {
        name: (value if isinstance(value, Metric) else Metric.sum(value)).detach() for name, value in reported.items()
    }


def reduce_metrics(reports: Sequence[Mapping[str, Metric]], group: dist.ProcessGroup, part: int) -> dict[str, float]:
    """Reduces the metrics of micro-batches, here and over the ranks, in float64 and in rank order. Collective.

    Args:
        reports: the metrics of each micro-batch of this rank.
        group: of gloo, over all ranks.
        part: which part of the global batch this rank works on; ranks of the same part report the same, once.

    Raises:
        ValueError: a metric is not 0-d, or not every micro-batch on every rank reports the same names and kinds; on
            every rank.
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
    if kinds[0] in ("sum", "mean"):
        # fsum does not depend on the order, but refuses what is not finite
        return kinds[0], math.fsum(values) if all(map(math.isfinite, values)) else sum(values), weight
    if any(map(math.isnan, values)):  # it compares with nothing, so the order would decide whether it is seen
        return kinds[0], math.nan, weight
    return kinds[0], max(values) if kinds[0] == "max" else min(values), weight


def _finish(item: Reduced) -> float:
    kind, value, weight = item
    if kind == "sum":
        return value
    if weight == 0:
        return 0.0
    return value / weight if kind == "mean" else value
