"""Lengths of responses to replay: fixed, recorded, or from a formula."""

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np

from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.metrics import QUANTILES
from tidemill_trainer.run_dir import read_lines

_COUNT = 1024
_SIGMA = 0.8
"""Standard deviation of the logarithm of "lognormal" lengths: the 99th percentile is 6.4 times the median."""


def parse_lengths(text: str) -> list[int]:
    """Return the values of `rollout.response_lengths` for the option `--lengths`.

    Args:
        text: a number; "lognormal:MEAN,MAX"; a `metrics.jsonl` of a run; or a file with one number per line.

    Raises:
        ConfigError: none of these, or a length below 1.
    """
    try:
        if text.isdecimal():
            lengths = [int(text)]
        elif text.startswith("lognormal:"):
            mean, longest = text.removeprefix("lognormal:").split(",")
            lengths = lognormal_lengths(float(mean), int(longest))
        elif text.endswith(".jsonl"):
            lengths = recorded_lengths(Path(text))
        else:
            lengths = [int(line) for line in Path(text).read_text().split()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            "--lengths must be a number, lognormal:MEAN,MAX, the metrics.jsonl of a run, or a file with one number per "
            f"line; got {text!r}: {error}"
        ) from error
    if min(lengths, default=0) < 1:
        raise ConfigError(f"--lengths must have numbers >= 1, got {min(lengths, default='none')} in {text!r}")
    return lengths


def lognormal_lengths(mean: float, longest: int) -> list[int]:
    """Return quantiles of a log-normal distribution that is cut off at `longest`, with this mean after it.

    Raises:
        ValueError: the mean is not below the maximum.
    """
    if not 1 <= mean < longest:
        raise ValueError(f"the mean must be >= 1 and below the maximum of {longest}, got {mean:g}")
    normal = np.array([NormalDist().inv_cdf((number + 0.5) / _COUNT) for number in range(_COUNT)])
    shape = np.exp(_SIGMA * normal)
    low, high = 0.0, float(longest) / float(shape[0])
    for _ in range(60):  # the mean rises with the scale
        scale = (low + high) / 2
        low, high = (scale, high) if np.minimum(shape * scale, longest).mean() < mean else (low, scale)
    return [max(1, round(value)) for value in np.minimum(shape * low, longest).tolist()]


def recorded_lengths(metrics: Path) -> list[int]:
    """Return quantiles of the response lengths of a run, by the percentiles in `metrics.jsonl`, averaged over steps.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no percentiles.
    """
    names = ["min", *(f"p{percent}" for percent in QUANTILES), "max"]
    rows = [row for row in read_lines(metrics) if all(row.get(f"response_length/{name}") is not None for name in names)]
    if not rows:
        raise ValueError(f"no step has the metrics response_length/ of {', '.join(names)}")
    known = [math.fsum(row[f"response_length/{name}"] for row in rows) / len(rows) for name in names]
    at = (np.arange(_COUNT) + 0.5) / _COUNT * 100
    return [max(1, round(value)) for value in np.interp(at, [0, *QUANTILES, 100], known).tolist()]
