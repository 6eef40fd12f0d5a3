import subprocess
import sys

import tidemill_dispatch


def test_all_is_pinned():
    assert tidemill_dispatch.__all__ == [
        "Batch",
        "CallTimeoutError",
        "Dispatch",
        "DispatchMode",
        "Execute",
        "ListBatch",
        "MeshLayout",
        "Padding",
        "Replicate",
        "Shard",
        "Worker",
        "WorkerDiedError",
        "WorkerError",
        "make_dp_compute_dataproto_dispatch_fn",
        "make_nd_compute_dataproto_dispatch_fn",
        "register",
        "register_dispatch_mode",
    ]
    assert all(name in vars(tidemill_dispatch) for name in tidemill_dispatch.__all__)


def test_all_of_the_ray_half_is_pinned():
    import tidemill_dispatch.ray as ray_half

    assert ray_half.__all__ == [
        "CallFuture",
        "DataProtoFuture",
        "RayClassWithInitArgs",
        "RayResourcePool",
        "RayWorkerGroup",
        "create_colocated_worker_cls",
        "merge_resource_pool",
        "split_resource_pool",
    ]
    assert all(name in vars(ray_half) for name in ray_half.__all__)


def test_the_registry_imports_neither_ray_nor_torch():
    code = (
        "import sys, tidemill_dispatch; print([m for m in ('ray', 'torch', 'numpy', 'tensordict') if m in sys.modules])"
    )
    assert _run(code) == "[]"


def test_the_registry_and_the_arithmetic_work_where_ray_is_not_installed():
    code = """
import sys
sys.modules["ray"] = None  # import ray raises ImportError
import tidemill_dispatch as d
from tidemill_dispatch.mesh import MeshEntry

class W(d.Worker):
    @d.register(d.make_nd_compute_dataproto_dispatch_fn("m"))
    def f(self, batch): ...

class Group:
    world_size = 2
    def mesh(self, name):
        return d.MeshLayout.from_entries(name, [MeshEntry(dp_rank=1 - r, is_collect=True) for r in range(2)])

mode = d.make_nd_compute_dataproto_dispatch_fn("m")
calls = mode.dispatch_fn(Group(), (d.ListBatch([1, 2, 3]),), {})
by_rank = [args[0] for args, _ in calls]
print(by_rank, mode.collect_fn(Group(), [by_rank[r] for r in mode.result_ranks_fn(Group())]))
try:
    import tidemill_dispatch.ray
except ImportError as error:
    print(error)
"""
    assert _run(code).splitlines() == [
        "[ListBatch(items=[3]), ListBatch(items=[1, 2])] ListBatch(items=[1, 2, 3])",
        "tidemill_dispatch.ray needs Ray: pip install 'tidemill-dispatch[ray]'",
    ]


def _run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
