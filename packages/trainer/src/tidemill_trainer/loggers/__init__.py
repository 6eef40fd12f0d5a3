"""Loggers: the metrics of a run in TensorBoard, Weights & Biases or MLflow, in addition to `metrics.jsonl`."""

from tidemill_trainer.loggers.contract import Experiment, Logger
from tidemill_trainer.loggers.loggers import FACTORIES, open_loggers

__all__ = ["FACTORIES", "Experiment", "Logger", "open_loggers"]
