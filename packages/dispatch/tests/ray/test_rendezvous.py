import socket

import pytest

pytest.importorskip("ray")
from tidemill_dispatch.ray.rendezvous import (
    HostInfo,
    interface_environment,
    interface_of,
    rank_environment,
    reserve_port,
)


def test_reserved_port_is_not_assigned_to_others():
    with reserve_port() as held:
        port = held.getsockname()[1]
        others = []
        try:
            for _ in range(2000):
                other = socket.socket()
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("", 0))
                others.append(other)
            assert port not in {other.getsockname()[1] for other in others}
        finally:
            for other in others:
                other.close()


def test_server_that_asks_for_the_reserved_port_can_listen():
    with reserve_port() as held, socket.socket() as server, socket.socket() as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", held.getsockname()[1]))
        server.listen()
        client.connect(("127.0.0.1", held.getsockname()[1]))


def info(node, port, address=None):
    address = f"10.0.0.{node}" if address is None else address
    return HostInfo(node_id=node, node_ip=address, hostname=node, pid=1, process_group=1, port=port)


def test_environment_of_ranks_on_two_nodes():
    infos = (info("1", 5), info("2", 6), info("1", 7), info("2", 8))
    environments = [rank_environment(rank, infos) for rank in range(4)]
    assert [env["LOCAL_RANK"] for env in environments] == ["0", "0", "1", "1"]
    assert {(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in environments} == {("10.0.0.1", "5")}
    assert {(env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) for env in environments} == {("4", "2")}
    assert rank_environment(0, (info("1", 5),))["MASTER_ADDR"] == "127.0.0.1"


def test_group_on_two_nodes_uses_the_interface_of_rays_address():
    infos = (info("1", 5, "127.0.0.1"), info("2", 6))
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    chosen = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    assert interface_environment(0, infos, {}) == chosen
    assert interface_environment(0, infos, {"NCCL_SOCKET_IFNAME": "ib0"}) == {"GLOO_SOCKET_IFNAME": loopback}
    assert interface_environment(0, infos[:1], {}) == {}
    assert interface_environment(1, infos, {}) == {}  # no interface here has the address of the other node
