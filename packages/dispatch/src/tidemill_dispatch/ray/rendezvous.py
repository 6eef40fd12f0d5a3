"""Addresses and ports by which the ranks of a group find each other."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class HostInfo:
    """Where a rank runs, and the port that it reserves for the process group."""

    node_id: str
    node_ip: str
    hostname: str
    pid: int
    process_group: int
    port: int


def reserve_port() -> socket.socket:
    """Bind a free TCP port on all interfaces without listening.

    While the socket is open, the kernel does not assign the port to a process that asks for any free port. A server
    that asks for this port with SO_REUSEADDR, as torch's TCPStore does, can bind it. So there is no moment at which
    another process can take the port, unlike with bind, close and bind again.
    """
    if socket.has_dualstack_ipv6():
        held = socket.socket(socket.AF_INET6)
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        held = socket.socket(socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def interface_of(address: str) -> str | None:
    """Return the name of the network interface of this machine that has an address; None if there is none."""
    import psutil  # part of Ray

    of_interface = {name: [each.address for each in found] for name, found in psutil.net_if_addrs().items()}
    return next((name for name, found in of_interface.items() if address in found), None)


def interface_environment(rank: int, infos: tuple[HostInfo, ...], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a group on several nodes uses the network of Ray, unless they are set.

    Otherwise gloo uses the interface that the host name resolves to, often loopback, and NCCL guesses.
    """
    name = interface_of(infos[rank].node_ip)
    if len({info.node_id for info in infos}) == 1 or name is None:
        return {}
    chosen = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # "=": not those that start with it
    return {variable: value for variable, value in chosen.items() if variable not in environment}


def rank_environment(rank: int, infos: tuple[HostInfo, ...]) -> dict[str, str]:
    """Return the variables of torch's `env://` rendezvous. A group on one node uses the loopback address."""
    nodes = [info.node_id for info in infos]
    one_node = len(set(nodes)) == 1
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(infos)),
        "LOCAL_RANK": str(nodes[:rank].count(nodes[rank])),
        "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
        "MASTER_ADDR": "127.0.0.1" if one_node else infos[0].node_ip,
        "MASTER_PORT": str(infos[0].port),
    }
