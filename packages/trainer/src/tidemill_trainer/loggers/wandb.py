"""Weights & Biases, online or with `WANDB_MODE=offline`."""

import secrets
from collections.abc import Mapping

import wandb

from tidemill_trainer.loggers.contract import RL_AXIS, WARMUP_AXIS, Experiment

_FINISH_S = 300.0


class WandbLogger:
    """A `Logger` of one run of Weights & Biases. Login, server and mode come from wandb's environment variables.

    The number of the step is in the columns "step" and "sft/step", which are the x axes of the charts. wandb's own step
    only counts rows, since it must never decrease, and the warm-up has step numbers of its own.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.run_id = secrets.token_hex(4) if experiment.run_id is None else experiment.run_id
        self._run = wandb.init(
            project=experiment.project,
            name=experiment.name,
            id=self.run_id,
            resume="allow",
            dir=experiment.folder,
            config=dict(experiment.config),
            settings=wandb.Settings(
                console="off",
                quiet=True,
                finish_timeout=_FINISH_S,
                finish_timeout_raises=True,
            ),
        )
        self._run.define_metric("*", step_metric=RL_AXIS)
        self._run.define_metric("sft/*", step_metric=WARMUP_AXIS)
        files = experiment.folder / "wandb" / f"offline-run-*-{self.run_id}"
        self.location = f"wandb sync {files}" if self._run.offline else str(self._run.url)

    def log(self, axis: str, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, axis: step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
