import subprocess
import sys

import tidemill_dispatch


def test_public_names_are_pinned():
    assert tidemill_dispatch.__all__ == [
        "Batch",
        "CallTimeoutError",
        "Dispatch",
        "DispatchMode",
        "ListBatch",
        "MeshLayout",
        "Padding",
        "Replicate",
        "Shard",
        "Worker",
        "WorkerDiedError",
        "WorkerError",
        "register",
        "split_over",
        "split_over_ranks",
    ]
    assert all(name in vars(tidemill_dispatch) for name in tidemill_dispatch.__all__)


def test_public_names_of_ray_subpackage_are_pinned():
    import tidemill_dispatch.ray as ray_package

    assert ray_package.__all__ == [
        "CallFuture",
        "RayClassWithInitArgs",
        "RayResourcePool",
        "RayWorkerGroup",
        "create_colocated_worker_cls",
        "dead_workers",
        "merge_resource_pool",
        "reserve_port",
        "split_resource_pool",
    ]
    assert all(name in vars(ray_package) for name in ray_package.__all__)


def test_import_loads_neither_ray_nor_torch():
    code = (
        "import sys, tidemill_dispatch; print([m for m in ('ray', 'torch', 'numpy', 'tensordict') if m in sys.modules])"
    )
    assert _run(code) == "[]"


def test_modes_work_without_ray_and_ray_subpackage_names_the_extra():
    code = """
import sys
sys.modules["ray"] = None  # import ray raises ImportError
import tidemill_dispatch as d
from tidemill_dispatch.mesh import MeshEntry

class W(d.Worker):
    @d.register(d.split_over("m"))
    def f(self, batch): ...

class Group:
    world_size = 2
    def mesh(self, name):
        return d.MeshLayout.from_entries(name, [MeshEntry(dp_rank=1 - r, is_collect=True) for r in range(2)])

mode = d.split_over("m")
calls = mode.dispatch_fn(Group(), (d.ListBatch([1, 2, 3]),), {})
by_rank = [args[0] for args, _ in calls.values()]
print(by_rank, mode.collect_fn(Group(), [by_rank[r] for r in mode.collect_ranks_fn(Group())]))
try:
    import tidemill_dispatch.ray
except ImportError as error:
    print(error)
"""
    assert _run(code).splitlines() == [
        "[ListBatch(items=[3]), ListBatch(items=[1, 2])] ListBatch(items=[1, 2, 3])",
        "tidemill_dispatch.ray requires Ray: pip install 'tidemill-dispatch[ray]'",
    ]


def _run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
