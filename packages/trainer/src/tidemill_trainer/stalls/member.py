"""The membership of a worker process in a run."""

from pathlib import Path

import ray

from tidemill_trainer.logs import redirect_output
from tidemill_trainer.stalls.process import Registration, register
from tidemill_trainer.stalls.stack import enable_traces


def join_run(log_dir: str, name: str) -> None:
    """Write the output of this process to `log_dir`/`name`.log, and make it known to reports about the run."""
    redirect_output(log_dir, name)
    enable_traces()
    register(Path(log_dir), Registration.of_this_process(name, ray.get_runtime_context().get_node_id()))
