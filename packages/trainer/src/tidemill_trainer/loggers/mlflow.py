"""MLflow, with the server or store of `MLFLOW_TRACKING_URI`."""

import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from tidemill_trainer.loggers.contract import Experiment

_MAX_METRICS, _MAX_PARAMS = 1000, 100  # MLflow's limits for one request
_INVALID = re.compile(r"[^/\w.\- :]")


class MLflowLogger:
    """A `Logger` of one run of MLflow. The project is MLflow's experiment; the configuration becomes parameters."""

    def __init__(self, experiment: Experiment) -> None:
        # MLflow has no argument for this. Its default of 7 blocks the run for four minutes; this one for a minute.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
        self._client = MlflowClient()
        if experiment.run_id is None:
            self.run_id = self._create_run(experiment)
        else:
            self.run_id = experiment.run_id
            self._client.update_run(self.run_id, status="RUNNING")
        self.location = f"MLflow, run {self.run_id} at {self._client.tracking_uri}"

    def _create_run(self, experiment: Experiment) -> str:
        known = self._client.get_experiment_by_name(experiment.project)
        parent = self._client.create_experiment(experiment.project) if known is None else known.experiment_id
        run_id = self._client.create_run(parent, run_name=experiment.name).info.run_id
        params = [Param(_name(key), str(value)) for key, value in _leaves(experiment.config)]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(run_id, params=params[start : start + _MAX_PARAMS])
        return run_id

    def log(self, axis: str, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(_name(name), number, now, step) for name, number in numbers.items()]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _MAX_METRICS])

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


def _name(name: str) -> str:
    """Replace the characters that MLflow does not allow, "@" as verl does, and parts that a path would not have."""
    return posixpath.normpath(_INVALID.sub("_", name.replace("@", "_at_")))


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
