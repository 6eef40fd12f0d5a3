"""Ports for servers that bind them only some seconds after they are told to."""

import os
import random
import socket


def free_ports(number: int) -> list[int]:
    """Return `number` free TCP ports of 20000 to 29999.

    The system never gives these to a socket that asks for any port, as most servers and clients of other processes do,
    so they are still free when a server has done its imports. Ray's workers use 10002 to 19999. Two processes of
    pytest-xdist get different ports, even if no server listens yet.
    """
    free: list[int] = []
    is_odd = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2
    for port in random.SystemRandom().sample(range(20000 + is_odd, 30000, 2), 100 * number):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                free.append(port)
        if len(free) == number:
            return free
    raise RuntimeError(f"of {100 * number} ports, fewer than {number} are free")
