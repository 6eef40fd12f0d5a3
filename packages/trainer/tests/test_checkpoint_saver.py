"""Checkpoints whose files are written while the run continues."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from tidemill_dispatch import CallTimeoutError, WorkerError
from tidemill_trainer.checkpoint_saver import CheckpointSaver
from tidemill_trainer.checkpoints import CheckpointError, Checkpoints
from tidemill_trainer.stalls.report import StallError
from tidemill_trainer.waits import Wait, Waits


class Workers:
    """Workers that write in the background until `is_done`, or fail."""

    def __init__(self):
        self.is_done = False
        self.error = None
        self.num_calls = self.num_waits = 0

    def is_written(self, waits):
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        self.num_waits += waits
        self.is_done |= waits
        return self.is_done


@pytest.fixture
def workers():
    return Workers()


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path, max_to_keep=1)


@pytest.fixture
def reports():
    return []


@pytest.fixture
def saver(checkpoints, workers, reports):
    waits = Waits({"save_checkpoint": Wait(name="the checkpoint", on="the workers")})
    return CheckpointSaver(checkpoints, workers.is_written, waits, reports.append)


def write(folder):
    Path(folder).mkdir()
    (Path(folder) / "weights").write_text("new")


def test_checkpoint_counts_and_replaces_older_ones_only_after_it_is_written(saver, workers, checkpoints):
    checkpoints.save(1, write)
    saver.save(2, write)
    saver.commit()
    assert checkpoints.steps() == [1]
    workers.is_done = True
    saver.commit()
    assert checkpoints.steps() == [2]
    assert workers.num_waits == 0


def test_next_save_waits_for_the_previous_one(saver, workers, checkpoints):
    saver.save(1, write)
    saver.save(2, write)
    assert workers.num_waits == 1
    assert checkpoints.steps() == [1]


def test_failed_write_keeps_the_previous_checkpoint(saver, workers, checkpoints, tmp_path):
    checkpoints.save(1, write)
    saver.save(2, write)
    workers.error = OSError("no space left")
    message = r"cannot save .*step_000002: no space left; the newest .*step_000001"
    with pytest.raises(CheckpointError, match=message), saver:
        saver.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def _timeout():
    return CallTimeoutError(group="actor", method="finish_checkpoint", timeout_s=1.0, still_running=(0,))


def test_workers_that_do_not_answer_are_waited_for_once(saver, workers):
    workers.error = _timeout()
    saver.save(1, write)
    with pytest.raises(CallTimeoutError), saver:
        saver.commit(waits=True)
    assert workers.num_calls == 1


def _worker_error(**more):
    return WorkerError(
        group="actor",
        rank=0,
        host="node:1",
        method="update_actor",
        error_type="OutOfMemoryError",
        error_message="full",
        remote_traceback="",
        **more,
    )


@pytest.mark.parametrize(
    ("error", "steps"),
    [
        (None, [1]),
        (ValueError("of the driver"), [1]),
        (_worker_error(), [1]),
        (_worker_error(still_running=(1,)), []),
        (StallError("no progress"), []),
        (KeyboardInterrupt(), [1]),
    ],
)
def test_end_of_the_run_waits_unless_workers_may_never_answer(saver, workers, checkpoints, error, steps):
    with nullcontext() if error is None else pytest.raises(type(error)), saver:
        saver.save(1, write)
        saver.commit()
        if error is not None:
            raise error
    assert checkpoints.steps() == steps
    assert workers.num_waits == len(steps)


def test_ctrl_c_waits_for_the_checkpoint_that_is_being_written(saver, checkpoints, reports):
    saver.save(1, write)
    saver.commit()
    with pytest.raises(KeyboardInterrupt), saver:
        raise KeyboardInterrupt
    assert checkpoints.steps() == [1]
    assert reports == ["waiting for the checkpoint of step 1; Ctrl-C again to stop without it"]


def test_ctrl_c_while_a_checkpoint_is_waited_for_waits_once_more(saver, workers, checkpoints):
    saver.save(1, write)
    workers.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        saver.save(2, write)
    workers.error = None
    with pytest.raises(KeyboardInterrupt), saver:
        raise KeyboardInterrupt
    assert checkpoints.steps() == [1]


def test_second_ctrl_c_stops_without_the_checkpoint(saver, workers, checkpoints):
    saver.save(1, write)
    saver.commit()
    workers.error = KeyboardInterrupt("the second one")
    with pytest.raises(KeyboardInterrupt, match="the second one"), saver:
        raise KeyboardInterrupt
    assert checkpoints.steps() == []


@pytest.mark.parametrize("error", [OSError("no space left"), _timeout()])
def test_checkpoint_that_fails_after_ctrl_c_is_reported(saver, workers, checkpoints, reports, error):
    saver.save(1, write)
    saver.commit()
    workers.error = error
    with pytest.raises(KeyboardInterrupt), saver:
        raise KeyboardInterrupt
    assert checkpoints.steps() == []
    assert reports[1].startswith("the checkpoint of step 1 is not complete: ")
    assert str(error) in reports[1]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("of the driver")])
def test_checkpoint_of_a_step_without_metrics_does_not_count(saver, checkpoints, error):
    saver.save(1, write)
    with pytest.raises(type(error)), saver:
        raise error
    assert checkpoints.steps() == []
