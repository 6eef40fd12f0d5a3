"""A group on two nodes whose addresses differ, with a second network interface that leads nowhere."""

import sys

import pytest
from tidemill_testing.nodes import start_nodes, why_no_nodes

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(why_no_nodes() is not None, reason=str(why_no_nodes())),
]

_DRIVER = """
import os, sys, ray, torch
import torch.distributed as dist
from ray import cloudpickle
from tidemill_dispatch import Dispatch, Worker, register
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

class Summing(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self):
        dist.init_process_group("gloo")
        value = torch.tensor(1.0 + self.rank)
        dist.all_reduce(value)
        names = [os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR")]
        return value.item(), *names

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ray.init(address="auto", log_to_driver=False)
pool = RayResourcePool([1, 1], distinct_nodes=True)
with RayWorkerGroup(pool, RayClassWithInitArgs(Summing), name_prefix="two", timeout_s=100) as group:
    print([host.node_ip for host in group.hosts()], group.sum_of_ranks())
"""


def test_process_group_uses_the_network_of_ray_not_the_default_route():
    with start_nodes(2) as nodes:
        for node in nodes:
            node.add_interface("eth1", f"10.88.0.{node.number + 1}", is_connected=False)
            node.run("ip", "route", "replace", "default", "via", "10.88.0.254", "dev", "eth1")
        for node in nodes:
            node.start_ray(head=nodes[0], num_cpus=1, timeout_s=250)
        printed = nodes[0].run(sys.executable, "-c", _DRIVER, timeout_s=250).splitlines()[-1]
    rank = (3.0, "eth0", "=eth0", nodes[0].address)
    assert printed == f"{[node.address for node in nodes]} {[rank, rank]}"
