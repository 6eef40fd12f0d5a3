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
        "Worker",
        "WorkerDiedError",
        "WorkerError",
        "make_nd_compute_dataproto_dispatch_fn",
        "register",
        "register_dispatch_mode",
    ]
    assert all(name in vars(tidemill_dispatch) for name in tidemill_dispatch.__all__)


def test_all_of_the_ray_half_is_pinned():
    import tidemill_dispatch.ray as ray_half

    assert ray_half.__all__ == ["CallFuture", "RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup"]
    assert all(name in vars(ray_half) for name in ray_half.__all__)


def test_the_registry_imports_neither_ray_nor_torch():
    code = (
        "import sys, tidemill_dispatch; print([m for m in ('ray', 'torch', 'numpy', 'tensordict') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
