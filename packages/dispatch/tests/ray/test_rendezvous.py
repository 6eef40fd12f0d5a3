import socket

import pytest

pytest.importorskip("ray")
from tidemill_dispatch.ray.rendezvous import HostInfo, rank_environment, reserve_port


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


def test_environment_of_ranks_on_two_nodes():
    def info(node, port):
        return HostInfo(node_id=node, node_ip=f"10.0.0.{node}", hostname=node, pid=1, process_group=1, port=port)

    infos = (info("1", 5), info("2", 6), info("1", 7), info("2", 8))
    environments = [rank_environment(rank, infos) for rank in range(4)]
    assert [env["LOCAL_RANK"] for env in environments] == ["0", "0", "1", "1"]
    assert {(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in environments} == {("10.0.0.1", "5")}
    assert {(env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) for env in environments} == {("4", "2")}
    assert rank_environment(0, (info("1", 5),))["MASTER_ADDR"] == "127.0.0.1"
