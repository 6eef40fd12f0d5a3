"""The membership of a worker process in a run."""

import socket
from pathlib import Path

import ray

from tidemill_trainer.logs import redirect_output
from tidemill_trainer.stalls.process import Registration, register
from tidemill_trainer.stalls.stack import enable_traces


def join_run(log_dir: str, name: str) -> None:
    """Write the output of this process to `log_dir`/`name`.log, and make it known to reports about the run.

    Raises:
        RuntimeError: the folder does not exist on this node.
    """
    if not Path(log_dir).is_dir():
        node = f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"
        raise RuntimeError(
            f"expected the folder {log_dir} of the run on node {node}, found none; trainer.run_dir must be on a file "
            "system that all nodes of the run share"
        )
    redirect_output(log_dir, name)
    enable_traces()
    register(Path(log_dir), Registration.of_this_process(name, ray.get_runtime_context().get_node_id()))
