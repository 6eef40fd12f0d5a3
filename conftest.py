"""What the tests of all packages share: one SGLang engine for the session, and Ctrl-C."""

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Ray would see `uv run pytest` and build the whole environment again for its workers. Read when Ray is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

_SESSION = pytest.StashKey[pytest.Session]()
_LOADERS = Path(__file__).parent / "testing" / "loaders"


def pytest_configure(config: pytest.Config) -> None:
    atexit.register(_leave, config)  # early, so that what others register runs before it


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[_SESSION] = session


def _leave(config: pytest.Config) -> None:
    """Ends the process with the status of the tests, before C++ objects are destroyed under threads that Ray has left.

    Else a run can end by SIGSEGV after all tests have passed (seen twice, on a busy machine, with Ray 2.60 loaded).
    """
    if "ray" in sys.modules and _SESSION in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(config.stash[_SESSION].exitstatus))


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Lets SIGINT interrupt, here and in processes started meanwhile, also where pytest runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny float32 Qwen3 that `engine` starts with."""
    from tidemill_testing import tiny_model

    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", num_hidden_layers=3)


@pytest.fixture(scope="session")
def engine(checkpoint: Path) -> Iterator[Any]:
    """A stock `sglang.Engine`, small enough that prompts are prefilled in pieces and batches run in waves.

    The only one in this process: the shutdown of an engine kills all children of its process, other engines' too. Tests
    that need the weights of `checkpoint` load them.
    """
    sys.path.insert(0, str(_LOADERS))  # multiprocessing hands it on to the scheduler
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import sglang
    from tidemill_weight_update.sglang import sglang_launch_args

    loaders = ["reversed_loader.load_reversed", "engine_probe.dump", "engine_probe.scramble"]
    engine = sglang.Engine(
        model_path=str(checkpoint),
        skip_tokenizer_init=True,
        enable_deterministic_inference=True,
        chunked_prefill_size=32,
        max_total_tokens=1024,
        log_level="warning",
        **sglang_launch_args(custom_weight_loader=loaders),
    )
    sys.path.remove(str(_LOADERS))
    yield engine
    engine.shutdown()
    addresses = [value for value in vars(engine.port_args).values() if str(value).startswith("ipc://")]
    for path in [engine.tokenizer_manager.load_snapshot_reader.path, *(a.removeprefix("ipc://") for a in addresses)]:
        Path(path).unlink(missing_ok=True)  # SGLang leaves them
