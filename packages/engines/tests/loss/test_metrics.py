"""Reduced metrics equal a plain computation over the whole batch, for any split."""

import pytest
import torch
from tidemill_engines.loss.metrics import Metric, as_metrics, reduce_metrics
from tidemill_testing import run_ranks

VALUES = torch.tensor([3.0, -1.0, 4.0, torch.nan, 5.0, -9.0, 2.0])
MASK = torch.tensor([1, 1, 1, 0, 1, 0, 1])
# ranks -> micro-batches -> which of the values
SPLITS = [
    [[range(7)]],
    [[range(3), range(3, 7)]],
    [[range(1), range(1, 6)], [range(6, 7), range(0)]],
    [[range(3, 4), range(5, 6)], [[0, 1, 2, 4, 6]]],
]


def report(rows):
    values, mask = VALUES[list(rows)], MASK[list(rows)]
    kept = torch.where(mask != 0, values, 0.0)
    return as_metrics(
        {
            "share": kept.sum() / MASK.sum(),
            "sum": Metric.sum(kept.sum()),
            "mean": Metric.mean(values, mask),
            "weighted": Metric.mean(kept, mask * 2.5),
            "max": Metric.max(values, mask),
            "min": Metric.min(values, mask),
            "nothing": Metric.mean(values, mask * 0),
            "largest of nothing": Metric.max(values, mask * 0),
        }
    )


def run_splits(splits):
    rank = torch.distributed.get_rank()
    group = torch.distributed.group.WORLD
    out = []
    for split in splits:  # additional ranks share the part of the last
        part = min(rank, len(split) - 1)
        out.append(reduce_metrics([report(rows) for rows in split[part]], group, part))
    return out


def test_metrics_do_not_depend_on_split():
    expected = {
        "share": 13 / 5,
        "sum": 13.0,
        "mean": 13 / 5,
        "weighted": 13 / 5,
        "max": 5.0,
        "min": -1.0,
        "nothing": 0.0,
        "largest of nothing": 0.0,
    }
    for of_rank in run_ranks(run_splits, 2, SPLITS):
        for split, actual in zip(SPLITS, of_rank, strict=True):
            assert actual == pytest.approx(expected, rel=1e-7), split


BAD = {
    "other names": (
        lambda rank: {"a" if rank == 0 else "b": torch.ones(())},
        r"\['a'\] on rank 0 but \['b'\] on rank 1",
    ),
    "other kinds": (
        lambda rank: {"a": torch.ones(()) if rank == 0 else Metric.max(torch.ones(1), torch.ones(1))},
        "the same metrics",
    ),
    "a vector": (lambda rank: {"a": torch.ones(3 if rank else ())}, r"metric a must be 0-d, got shape \(3,\)"),
}


def run_bad():
    rank, group, caught = torch.distributed.get_rank(), torch.distributed.group.WORLD, {}
    for name, (make, _) in BAD.items():
        try:
            reduce_metrics([as_metrics(make(rank))], group, rank)
        except ValueError as error:
            caught[name] = str(error)
    numbers = [torch.tensor(torch.nan if rank else 1.0), torch.tensor(torch.inf if rank else 1.0)]
    report = {"nan": Metric.max(numbers[0][None], torch.ones(1)), "inf": Metric.sum(numbers[1])}
    with pytest.raises(ValueError, match="for the first micro-batch but"):
        reduce_metrics([as_metrics({"a": numbers[0]}), as_metrics({"b": numbers[0]})], group, rank)
    return caught, reduce_metrics([report], group, rank)


def test_invalid_metrics_raise_on_every_rank_and_nan_is_kept():
    for caught, metrics in run_ranks(run_bad, 2):
        for name, (_, message) in BAD.items():
            with pytest.raises(ValueError, match=message):
                raise ValueError(caught[name])
        assert metrics["inf"] == torch.inf
        assert metrics["nan"] != metrics["nan"]


def test_metric_mean_has_no_gradient():
    metric = as_metrics({"m": Metric.mean(torch.ones(2, requires_grad=True), torch.ones(2))})["m"]
    assert not metric.value.requires_grad


def _with_ignored_values():
    ignored = {"mean": 5.0, "max": 9.0, "min": -9.0}
    reports = [
        {
            kind: Metric(kind=kind, value=torch.tensor(value), weight=torch.tensor(weight))
            for kind, value in values.items()
        }
        for values, weight in (
            (ignored, 0.0),
            (dict.fromkeys(ignored, 2.0), 2.0),
            (dict.fromkeys(ignored, torch.nan), 0.0),
        )
    ]
    return reduce_metrics(reports, torch.distributed.group.WORLD, 0)


def test_value_without_weight_is_ignored():
    assert run_ranks(_with_ignored_values, 1) == [{"mean": 1.0, "max": 2.0, "min": 2.0}]


def test_extremes_of_whole_numbers():
    values, mask = torch.tensor([3, 4, 9]), torch.tensor([1, 1, 0])
    assert (Metric.max(values, mask).value.item(), Metric.min(values, mask).value.item()) == (4.0, 3.0)
