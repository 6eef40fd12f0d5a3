"""Shared by the tests of all packages: how tests are spread over processes, one SGLang engine, and Ctrl-C."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Ray detects `uv run pytest` and builds the whole environment again for its workers. Read when Ray is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel, and each starts several processes

_LOADERS = Path(__file__).parent / "testing" / "loaders"
# Files that use one of these session fixtures run in one process, so that it starts once.
_GROUP_OF_FIXTURE = {"engine": "sglang", "ray_cluster": "ray"}
_LONGEST_FIRST = ["cluster", "sglang", "ray"]
_GROUPS = "tidemill/groups"
_STDERR = pytest.StashKey[int]()
_RAY_WORKERS = pytest.StashKey[dict[str, str]]()


class GroupScheduling(LoadScopeScheduling):
    """Run each file in one worker, and all files of one group in the same worker.

    The `loadgroup` of pytest-xdist 3.8.0 ignores groups under pytest 9.2: it appends their names to `Item._nodeid`,
    which pytest no longer reads. Here, a worker writes the group of each file to pytest's cache after collection.
    """

    def schedule(self) -> None:
        self._groups = self.config.cache.get(_GROUPS, {})
        super().schedule()

    def remove_node(self, node: Any) -> str | None:
        """Report the test that crashed a worker, and do not run it again: it would crash the next worker."""
        workload = self.assigned_work.pop(node)
        pending = [(unit, nodeid) for unit in workload.values() for nodeid, done in unit.items() if not done]
        if not pending:
            return None
        unit, crashed = pending[0]
        unit[crashed] = True
        self.workqueue.update({scope: unit for scope, unit in workload.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _split_scope(self, nodeid: str) -> str:
        return self._groups.get(_file_of(nodeid), _file_of(nodeid))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # output is not captured yet


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use two workers; run in this process where one file is named, or where tests would compete for a GPU.

    Slow tests run in this process, too: some check which files a killed run leaves behind on the machine, and others
    kill SGLang, which leaves files behind.
    """
    one_file = len(config.args) == 1 and ".py" in config.args[0]
    is_slow = config.option.markexpr == "slow"
    return 0 if one_file or is_slow or any(Path("/dev").glob("nvidia[0-9]*")) else 2


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker: group files that share an engine or a cluster, and start the longest groups first."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return
    groups: dict[str, str] = {}
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        shared = [_GROUP_OF_FIXTURE[name] for name in item.fixturenames if name in _GROUP_OF_FIXTURE]
        if mark is not None:
            groups[_file_of(item.nodeid)] = mark.args[0]
        elif shared:
            groups.setdefault(_file_of(item.nodeid), shared[0])
    items.sort(key=lambda item: _start_order(item, groups.get(_file_of(item.nodeid))))
    if worker["workerid"] == "gw0":
        config.cache.set(_GROUPS, groups)


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _start_order(item: pytest.Item, group: str | None) -> int:
    if group in _LONGEST_FIRST:
        return _LONGEST_FIRST.index(group)
    starts_servers = any(item.iter_markers("sglang")) or any(item.iter_markers("ray"))
    return len(_LONGEST_FIRST) + (0 if starts_servers else 1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fork Ray's workers and their engines, which saves CPU time; not in slow tests, nor where they import little."""
    marks = {mark.name for mark in item.iter_markers()}
    for name in item.session.stash.setdefault(_RAY_WORKERS, {}):
        os.environ.pop(name, None)
    if "ray" in marks and "slow" not in marks and "dispatch" not in item.path.parts:
        os.environ |= _forked_workers(item.session.stash)


def _forked_workers(stash: pytest.Stash) -> dict[str, str]:
    import torch
    from tidemill_testing.ray_workers import fork_ray_workers

    # Some of the preloaded modules initialize CUDA, and a process forked after that cannot use it.
    if not stash[_RAY_WORKERS] and not torch.cuda.is_available():
        stash[_RAY_WORKERS] = fork_ray_workers()
    return stash[_RAY_WORKERS]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the copy plans of the engines' models out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Restore Python's SIGINT handler, here and in processes started meanwhile: background jobs ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def _own_stderr(config: pytest.Config) -> Iterator[None]:
    """Let processes that start now write to the terminal: if they end this process, captured output is lost."""
    captured = os.dup(2)
    os.dup2(config.stash[_STDERR], 2)
    yield
    os.dup2(captured, 2)
    os.close(captured)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny float32 Qwen3 that `engine` is launched with."""
    from tidemill_testing import tiny_model

    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", num_hidden_layers=3)


@pytest.fixture(scope="session")
def engine(checkpoint: Path, pytestconfig: pytest.Config) -> Iterator[Any]:
    """Stock `sglang.Engine`, small enough that prompts are prefilled in chunks and batches run in waves.

    It is the only engine in this process: `Engine.shutdown` kills all children of its process, including those of other
    engines. A test that needs the weights of `checkpoint` loads them.
    """
    sys.path.insert(0, str(_LOADERS))  # multiprocessing passes it on to the scheduler process
    import sglang
    from tidemill_testing.ports import free_ports
    from tidemill_weight_update.sglang import sglang_launch_args

    loaders = ["reversed_loader.load_reversed", "engine_probe.dump", "engine_probe.scramble"]
    with _own_stderr(pytestconfig):
        engine = sglang.Engine(
            model_path=str(checkpoint),
            skip_tokenizer_init=True,
            enable_deterministic_inference=True,
            chunked_prefill_size=32,
            max_total_tokens=1024,
            log_level="warning",
            nccl_port=free_ports(1)[0],
            **sglang_launch_args(custom_weight_loader=loaders),
        )
    sys.path.remove(str(_LOADERS))
    yield engine
    engine.shutdown()
    addresses = [value for value in vars(engine.port_args).values() if str(value).startswith("ipc://")]
    for path in [engine.tokenizer_manager.load_snapshot_reader.path, *(a.removeprefix("ipc://") for a in addresses)]:
        Path(path).unlink(missing_ok=True)  # SGLang does not remove them
