import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tidemill_testing.nodes import Node, start_nodes, why_no_nodes

pytestmark = pytest.mark.skipif(why_no_nodes() is not None, reason=str(why_no_nodes()))

# Sends "hello" to whoever connects.
_SERVER = """
import socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    while True:
        server.accept()[0].sendall(b"hello")
"""
_CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=3) as connection:
    print(connection.recv(5).decode())
"""


@pytest.fixture
def two(tmp_path):
    with start_nodes(2, shared=[tmp_path]) as nodes:
        yield nodes


def _serve(node: Node) -> None:
    server = node.start(sys.executable, "-c", _SERVER, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"


def _ask(node: Node, address: str) -> str:
    return node.run(sys.executable, "-c", _CLIENT, address).strip()


def test_nodes_have_names_files_and_processes_of_their_own(two, tmp_path):
    first, second = two
    assert [node.run("hostname").strip() for node in two] == ["node0", "node1"]
    assert socket.gethostname() not in ("node0", "node1")
    for folder in ("/tmp", "/dev/shm"):
        first.run("touch", f"{folder}/of-first")
        assert "of-first" not in second.run("ls", folder)
        assert not os.path.exists(f"{folder}/of-first")
    first.run("touch", f"{tmp_path}/of-all")
    assert second.run("ls", str(tmp_path)) == "of-all\n"
    assert len(second.run("ls", "/proc").split()) < len(os.listdir("/proc"))


def test_nodes_reach_each_other_only_while_their_link_is_up(two):
    first, second = two
    _serve(first)
    assert _ask(second, first.address) == "hello"
    first.set_link(is_up=False)
    with pytest.raises(RuntimeError, match=r"TimeoutError|No route to host"):
        _ask(second, first.address)
    first.set_link(is_up=True)
    assert _ask(second, first.address) == "hello"


def test_interface_that_is_not_connected_has_an_address_that_others_do_not_reach(two):
    first, second = two
    first.add_interface("eth1", "10.88.0.1", is_connected=False)
    second.add_interface("eth1", "10.88.0.2", is_connected=False)
    _serve(first)
    assert _ask(first, "10.88.0.1") == "hello"
    with pytest.raises(RuntimeError, match=r"TimeoutError|No route to host"):
        _ask(second, "10.88.0.1")
    assert _ask(second, first.address) == "hello"


def test_processes_of_a_stopped_node_are_dead_and_those_of_others_live(two):
    processes = [node.start("sleep", "1000") for node in two]
    two[0].stop()
    assert processes[0].wait(timeout=30) != 0
    assert processes[1].poll() is None


_KEEPS_NODES = """
import sys, time
from tidemill_testing.nodes import start_nodes
with start_nodes(2) as nodes:
    sleepers = [node.start("sleep", sys.argv[1]) for node in nodes]  # each begins as a process named nsenter
    print("up", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind_by_a_process_that_is_interrupted_or_killed(number, ctrl_c, tmp_path):
    seconds = str(10_000_000 + os.getpid())  # in the command lines of this test's processes only
    links = _links()
    script = tmp_path / "keeps_nodes.py"
    script.write_text(_KEEPS_NODES)
    with subprocess.Popen([sys.executable, str(script), seconds], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "up\n"
            _wait_until(lambda: len(_running(seconds)) == 2, seconds)
            process.send_signal(number)
            process.wait(timeout=30)
        finally:
            process.kill()
    _wait_until(lambda: not _running(seconds), seconds)
    assert _links() == links


def _wait_until(is_true: Callable[[], bool], seconds: str) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline, _running(seconds)
        time.sleep(0.05)


def _running(seconds: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words[:2] == ["sleep", seconds]:
            found.append(" ".join(words))
    return found


def _links() -> set[str]:
    return {name for _, name in socket.if_nameindex()}
