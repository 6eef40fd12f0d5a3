import os
import resource
import subprocess
import sys
import time

import pytest
from tidemill_dispatch import CallTimeoutError, WorkerError
from tidemill_engines.location import file_system, read_text, sizes, written_to
from tidemill_testing.s3 import s3_bucket
from tidemill_trainer.checkpoints import CheckpointError, Checkpoints

_WHERE = {"group": "actor", "rank": 0, "host": "here:1", "method": "load_checkpoint"}


def _fill(text):
    def write(folder):
        with written_to(folder) as written:
            (written / "weights").write_text(text)

    return write


def _weights(checkpoints, step):
    return read_text(f"{checkpoints.path(step)}/weights")


@pytest.fixture(params=["path", "url"])
def folder(request, tmp_path):
    if request.param == "path":
        yield str(tmp_path)
    else:
        with s3_bucket() as url:
            yield f"{url}/runs"


def test_newest_checkpoints_are_kept_and_found(folder):
    checkpoints = Checkpoints(f"{folder}/c", max_to_keep=2)
    assert checkpoints.steps() == []
    for step in (4, 8, 12):
        checkpoints.save(step, _fill(str(step)))
    assert checkpoints.steps() == [8, 12]
    assert _weights(checkpoints, 12) == "12"
    assert checkpoints.read_step(checkpoints.path(12)) == 12
    checkpoints.save(12, _fill("again"))
    assert _weights(checkpoints, 12) == "again"


def test_prepared_checkpoint_does_not_count_before_commit(folder):
    checkpoints = Checkpoints(folder, max_to_keep=1)
    checkpoints.save(1, _fill("old"))
    checkpoints.prepare(2, _fill("new"))
    assert checkpoints.steps() == [1]
    assert checkpoints.commit(2) == checkpoints.path(2)
    assert checkpoints.steps() == [2]
    assert _weights(checkpoints, 2) == "new"


def test_full_disk_keeps_the_previous_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, max_to_keep=1)
    checkpoints.save(1, _fill("old"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # writing more fails as on a full disk
    try:
        with pytest.raises(CheckpointError, match=r"cannot save .*step_000002: .*; the newest complete .*step_000001"):
            checkpoints.save(2, _fill("x" * 5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.steps() == [1]
    assert _weights(checkpoints, 1) == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001"]


_KILLED = """
import sys, time
from pathlib import Path
from tidemill_engines.location import file_system, read_text, written_to
from tidemill_testing.s3 import s3_bucket
from tidemill_trainer.checkpoints import Checkpoints
def write(folder):
    Path(folder).mkdir()
    (Path(folder) / "weights").write_text("half")
    (Path(sys.argv[1]) / "started").touch()
    time.sleep(600)
Checkpoints(Path(sys.argv[1]), max_to_keep=1).save(2, write)
"""


def test_process_killed_while_saving_leaves_no_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, max_to_keep=1)
    checkpoints.save(1, _fill("old"))
    process = subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path)], env=os.environ)
    deadline = time.monotonic() + 240  # it imports torch
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert (tmp_path / "step_000002" / "weights").read_text() == "half"
    assert checkpoints.steps() == [1]
    checkpoints.save(3, _fill("new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["started", "step_000003"]


def test_removal_takes_no_run_with_a_similar_name():
    with s3_bucket() as url:
        runs = [Checkpoints(f"{url}/{name}", max_to_keep=1) for name in ("a1", "a[1]")]
        for checkpoints in runs:
            checkpoints.save(1, _fill("old"))
        runs[1].save(2, _fill("new"))
        assert [checkpoints.steps() for checkpoints in runs] == [[1], [2]]
        assert not sizes(runs[1].path(1))


def test_removal_leaves_no_folder_in_a_run_whose_name_is_a_pattern(tmp_path):
    checkpoints = Checkpoints(tmp_path / "lr[1]", max_to_keep=1)
    for step in (1, 2, 3):
        checkpoints.save(step, _fill(str(step)))
    assert sorted(path.name for path in (tmp_path / "lr[1]").iterdir()) == ["step_000003"]


def test_store_that_does_not_answer_is_named():
    checkpoints = Checkpoints("gs://tests/runs", max_to_keep=1)
    cause = "could not read gs://tests/runs: ImportError: Please install gcsfs to access Google Storage"
    with pytest.raises(CheckpointError, match=f"cannot list the checkpoints in gs://tests/runs: {cause}"):
        checkpoints.steps()
    with pytest.raises(CheckpointError, match=f"cannot save gs://tests/runs/step_000001: .*; cannot list .*{cause}"):
        checkpoints.save(1, _fill("x"))


def test_damaged_checkpoint_is_rejected_with_the_newest_complete_one(folder):
    checkpoints = Checkpoints(folder, max_to_keep=3)
    checkpoints.save(1, _fill("a"))
    path = checkpoints.save(2, _fill("b"))
    file_system(path).pipe_file(f"{path}/trainer.json", b"{")
    with pytest.raises(CheckpointError, match=r"trainer.json is damaged: .*newest complete .*step_000001; if"):
        checkpoints.read_step(path)
    file_system(path).pipe_file(f"{path}/trainer.json", b'{"format": 99, "step": 2}')
    with pytest.raises(CheckpointError, match="must have format 1, got 99; resume it with the version"):
        checkpoints.read_step(path)


@pytest.mark.parametrize("error_type", ["ValueError", "OSError"])
def test_error_of_a_file_that_a_worker_loads_says_how_to_continue(folder, error_type):
    checkpoints = Checkpoints(folder, max_to_keep=3)
    checkpoints.save(1, _fill("a"))
    path = checkpoints.save(2, _fill("b"))
    with (
        pytest.raises(CheckpointError, match=r"step_000002: not read; the newest .*step_000001; if .*remove its"),
        checkpoints.loading(path),
    ):
        raise WorkerError(**_WHERE, error_type=error_type, error_message="not read", remote_traceback="")


@pytest.mark.parametrize(
    "error",
    [
        WorkerError(**_WHERE, error_type="RuntimeError", error_message="no", remote_traceback=""),
        CallTimeoutError(group="actor", method="load_checkpoint", timeout_s=1.0, still_running=(0,)),
    ],
)
def test_other_errors_of_workers_are_no_fault_of_the_checkpoint(tmp_path, error):
    with pytest.raises(type(error)), Checkpoints(tmp_path, max_to_keep=3).loading("step_000001"):
        raise error
