"""The nodes of a cluster as namespaces of this machine: their addresses, files and processes differ as in reality."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
_UNSHARE = ("unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--propagation", "private")
# The init process of a node exits when the pipe from this process closes, and the kernel then kills all others there.
_INIT = ("bash", "-c", "echo ready; while read -r; do :; done")
_GATEWAY = "10.77.0.254"
_RAY_PORT = 6379
# Mounts the folders that all nodes share into a new /tmp, before it hides the old one.
_PRIVATE_TMP = """
mount -t tmpfs -o size=4g tmpfs /dev/shm
new=/dev/shm/tmp; mkdir $new; mount -t tmpfs -o size=8g,mode=1777 tmpfs $new
for folder in "$@"; do mkdir -p "$new${folder#/tmp}"; mount --rbind "$folder" "$new${folder#/tmp}"; done
mount --move $new /tmp; rmdir $new
"""


@cache
def why_no_nodes() -> str | None:
    """Return why this machine cannot have nodes, for `pytest.skip`; None if it can."""
    try:
        done = subprocess.run([*_UNSHARE, "ip", "link", "add", "type", "bridge"], capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"nodes require the commands unshare, nsenter and ip: {error}"
    return None if done.returncode == 0 else f"nodes require the right to create namespaces: {done.stderr.strip()}"


class _Namespaces:
    """Namespaces that exist until `close` or until this process has exited, even if it is killed."""

    def __init__(self) -> None:
        self._unshare = subprocess.Popen(
            [*_UNSHARE, *_INIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != b"ready\n":
            raise RuntimeError(f"cannot create namespaces; see the error of unshare above ({why_no_nodes()})")
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        self.pid = int(children.read_text())

    def enter(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` in these namespaces."""
        return ["nsenter", "--target", str(self.pid), *_NAMESPACES, "--wd=/", *command]

    def ip(self, *arguments: str) -> None:
        """Run `ip` in the network namespace only: it refers to other namespaces by process IDs of this machine."""
        _output(["nsenter", "--target", str(self.pid), "--net", "ip", *arguments])

    def close(self) -> None:
        """Kill all processes here. The kernel removes network and mounts with the last one."""
        self._unshare.kill()  # --kill-child: and the init process
        self._unshare.wait()
        for pipe in (self._unshare.stdin, self._unshare.stdout):
            assert pipe is not None
            pipe.close()


def _output(command: Sequence[str], **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


class Node:
    """A node with a network, a host name, a process table, a /tmp and a /dev/shm of its own; see `start_nodes`.

    Attributes:
        number: number of the node, from 0.
        name: its host name.
        address: address of its interface eth0, by which the nodes reach each other.
        env: environment variables of its commands, in addition to those of this process.
    """

    def __init__(self, number: int, switch: _Namespaces, shared: Sequence[Path], env: Mapping[str, str]) -> None:
        self.number = number
        self.name = f"node{number}"
        self.address = f"10.77.0.{number + 1}"
        self._switch = switch
        self.env = dict(env)
        self._namespaces = _Namespaces()
        try:
            self.run("hostname", self.name)
            self.run("bash", "-euc", _PRIVATE_TMP, "-", *map(str, shared))
            self._namespaces.ip("link", "set", "lo", "up")
            self.add_interface("eth0", self.address)
            self._namespaces.ip("route", "add", "default", "via", _GATEWAY)
        except BaseException:
            self.stop()
            raise

    def add_interface(self, name: str, address: str, *, is_connected: bool = True) -> None:
        """Add a network interface that is up.

        Args:
            name: its name in the node.
            address: its address, in a network of 256.
            is_connected: whether it reaches those of the other nodes.
        """
        port = f"{name}-{self.number}"
        network = str(self._namespaces.pid)
        self._switch.ip("link", "add", port, "type", "veth", "peer", "name", name, "netns", network)
        if is_connected:
            self._switch.ip("link", "set", port, "master", "bridge")
        self._switch.ip("link", "set", port, "up")
        self._namespaces.ip("address", "add", f"{address}/24", "dev", name)
        self._namespaces.ip("link", "set", name, "up")

    def set_link(self, *, is_up: bool) -> None:
        """Take the link of eth0 down, as if its cable were pulled, or up again."""
        self._switch.ip("link", "set", f"eth0-{self.number}", "up" if is_up else "down")

    def start(self, *command: str, **options: Any) -> "subprocess.Popen[str]":
        """Start a command on the node, in the folder "/"; it ends at the latest with the node.

        Args:
            options: options of `subprocess.Popen`. An `env` is added to the environment of this process.
        """
        env = {**os.environ, **self.env, **options.pop("env", {})}
        return subprocess.Popen(self._namespaces.enter(command), env=env, text=True, **options)

    def run(self, *command: str, timeout_s: float = 30.0) -> str:
        """Run a command on the node, as `start` does, and return what it prints.

        Raises:
            RuntimeError: its exit status is not 0; the message has its output.
            subprocess.TimeoutExpired: it did not exit within `timeout_s`.
        """
        return _output(self._namespaces.enter(command), timeout=timeout_s, env={**os.environ, **self.env})

    def start_ray(self, *, head: "Node", num_cpus: int, timeout_s: float = 120.0) -> None:
        """Start a Ray node here, of the cluster whose head is on `head`, which may be this node.

        Args:
            head: the node with the head; it starts first.
            num_cpus: CPUs of the Ray node.
        """
        head_address = f"{head.address}:{_RAY_PORT}"
        if head is self:
            role = ["--head", f"--port={_RAY_PORT}", "--include-dashboard=false", "--disable-usage-stats"]
        else:
            role = [f"--address={head_address}"]
        memory = f"--object-store-memory={300 << 20}"
        options = [f"--node-ip-address={self.address}", f"--num-cpus={num_cpus}", memory]
        self.run(sys.executable, "-m", "ray.scripts.scripts", "start", *role, *options, timeout_s=timeout_s)

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the node except its init process, also those whose parent has exited."""
        namespace = os.stat(f"/proc/{self._namespaces.pid}/ns/pid").st_ino
        found = []
        for process in psutil.process_iter():
            try:
                is_here = os.stat(f"/proc/{process.pid}/ns/pid").st_ino == namespace
            except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has exited, or is of another user
                continue
            if is_here and process.pid != self._namespaces.pid:
                found.append(process)
        return found

    def suspend(self) -> list[psutil.Process]:
        """Stop all processes of the node with SIGSTOP, as if the machine hung, and return them."""
        stopped: set[psutil.Process] = set()
        while running := set(self.processes()) - stopped:  # one of them may have started another meanwhile
            for process in running:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            stopped |= running
        return list(stopped)

    def stop(self) -> None:
        """Kill all processes of the node at once, as if its power failed."""
        self._namespaces.close()


@contextmanager
def start_nodes(number: int, *, shared: Sequence[Path] = ()) -> Iterator[list[Node]]:
    """Start nodes on this machine, and stop them after the block, also if this process is killed in it.

    Every node sees the file system of this machine, except for /tmp and /dev/shm.

    Args:
        number: number of nodes.
        shared: folders under /tmp that all nodes share, in addition to those from which this interpreter imports.
    """
    folders = [Path(folder).resolve() for folder in (sys.prefix, *filter(None, sys.path), *shared)]
    inside = {folder for folder in folders if folder.is_dir() and Path("/tmp") in folder.parents}
    outer = sorted(folder for folder in inside if not inside & {*folder.parents})
    with ExitStack() as stack:
        switch = _Namespaces()
        stack.callback(switch.close)
        switch.ip("link", "add", "bridge", "type", "bridge")
        switch.ip("address", "add", f"{_GATEWAY}/24", "dev", "bridge")
        switch.ip("link", "set", "bridge", "up")
        nodes = []
        env = {
            "RAY_AUTH_MODE": "token",  # Ray requires it of further nodes
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_worker_niceness": "0",  # the default is 15
            "RAY_memory_monitor_refresh_ms": "0",  # each node would count the memory of the whole machine
        }
        for index in range(number):
            nodes.append(Node(index, switch, outer, env))
            stack.callback(nodes[-1].stop)
        yield nodes
