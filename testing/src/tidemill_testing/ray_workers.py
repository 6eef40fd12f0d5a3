"""Ray workers, and the processes of their SGLang engines, forked from a server with preloaded imports.

Otherwise the imports take each worker seconds of CPU, and each process of SGLang 15 s.
"""

import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from typing import Any

_NAME = "TIDEMILL_RAY_WORKERS"
_LAUNCHER = """
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect("\\0" + sys.argv[1])
request = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(request).to_bytes(4)], [0, 1, 2])
server.sendall(request)
server.recv(1)  # until the worker exits
"""


def fork_ray_workers() -> dict[str, str]:
    """Start a server that ends with this process.

    It is no child of this process, because `sglang.Engine.shutdown` kills all of them.

    Returns:
        Environment variables with which processes start Ray clusters whose workers the server forks.
    """
    name = f"tidemill-workers-{os.getpid()}"
    end, _ = os.pipe()  # this process never closes the other end
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen(128)  # requests wait until the server has imported everything
        command = [sys.executable, "-m", __name__, str(listener.fileno())]
        subprocess.run(command, stdin=end, pass_fds=[listener.fileno()], check=True)
    os.close(end)
    return {_NAME: name, "RAY_RUNTIME_ENV_HOOK": f"{__name__}.with_launcher"}


def with_launcher(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Return the runtime environment with the launcher in place of Python; Ray calls this in `ray.init`."""
    launcher = f"{sys.executable} -S -E -c '{_LAUNCHER}' {os.environ[_NAME]}"
    return {"py_executable": launcher, **(runtime_env or {})}


def _serve(listener: socket.socket) -> None:
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401

    from tidemill_testing import preload  # noqa: F401

    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:  # the process of the tests has exited
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _run_worker(connection)
        connection.close()


def _run_worker(connection: socket.socket) -> None:
    """Become the worker that Ray has started the launcher for; the launcher ends with this process."""
    size, files, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as stream:
        arguments, environment, folder = json.loads(stream.read(int.from_bytes(size)))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    multiprocessing.set_start_method = lambda method, force: None  # SGLang's processes are forked, not spawned
    runpy.run_path(arguments[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that exited workers do not remain
        _serve(socket.socket(fileno=int(sys.argv[1])))
