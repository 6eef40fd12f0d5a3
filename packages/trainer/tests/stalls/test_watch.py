import os
import re
import signal

import pytest
from tidemill_dispatch import CallTimeoutError, WorkerError
from tidemill_trainer.stalls.process import register
from tidemill_trainer.stalls.report import StallError
from tidemill_trainer.stalls.watch import Watch
from tidemill_trainer.waits import Limit, Wait, Waits

_WAITS = {
    "step": Wait(name="the step", on="its phases"),
    "update": Wait(name="the update", on="the training workers", limits=(Limit(key="actor.timeout_s", seconds=0),)),
    "send": Wait(name="the weight update", on="the engines", worker_limit=Limit(key="a.timeout_s", seconds=0)),
}


@pytest.fixture
def waits():
    return Waits(_WAITS)


@pytest.fixture
def watch(waits, tmp_path, progress):
    return Watch(waits, tmp_path, progress)


def _timeout(*ranks):
    return CallTimeoutError(group="actor", method="update", timeout_s=0.0, still_running=ranks)


def _worker_error(*still_running):
    return WorkerError(
        group="actor",
        rank=0,
        host="here:1",
        method="update",
        error_type="RuntimeError",
        error_message="Connection closed by peer",
        remote_traceback="",
        still_running=still_running,
    )


def test_expired_wait_names_the_stopped_process_and_shows_where_it_is(watch, waits, endless, tmp_path):
    register(tmp_path, endless("actor_0"))
    stopped = endless("actor_1", stopped=True)
    register(tmp_path, stopped)
    with pytest.raises(StallError) as caught, watch(), waits("step"), waits("update"):
        raise _timeout(0, 1)
    message = str(caught.value)
    assert re.match(
        r"waiting for the update since \d+ s \(limit actor.timeout_s = 0 s\); rank 1 of group 'actor'", message
    )
    assert f"process {stopped.pid} on {os.uname().nodename}, is stopped (state T)" in message
    assert str(watch.report) in message
    assert isinstance(caught.value.__cause__, CallTimeoutError)
    report = watch.report.read_text()
    sections = ["waiting for the update", "Active waits", "Last progress", "Error", "Processes", "Last lines"]
    assert [section for section in sections if f"\n{section}" not in report] == []
    waits_shown = report.split("Active waits")[1].split("Last progress")[0]
    assert waits_shown.index("the step, by its phases (no limit)") < waits_shown.index("the update, by the training")
    stack = report.split("Stack traces")[1].split("== rank 1 of group 'actor'")[1]
    assert "stopped (state T) (py-spy)" in stack
    assert "endless_loop" in stack


def test_late_rank_is_the_culprit_if_no_process_is_stopped(watch, waits, endless, tmp_path):
    for rank in range(2):
        register(tmp_path, endless(f"actor_{rank}"))
    culprit = r"; rank 1 of group 'actor', process \d+ on [^,]+, is busy"
    with pytest.raises(StallError, match=culprit) as caught, watch(), waits("update"):
        raise _worker_error(1)
    assert "rank 0 of group 'actor', process" not in str(caught.value)


def test_worker_that_gave_up_waiting_for_others_is_reported(watch, waits):
    message = r"waiting for the weight update .*a\.timeout_s = 0 s.*; the engines did not finish"
    with pytest.raises(StallError, match=message), watch(), waits("send"):
        raise _worker_error()


def test_error_while_a_process_is_stopped_is_reported_with_its_cause(watch, waits, endless, tmp_path):
    register(tmp_path, endless("episodes_0", stopped=True))
    with pytest.raises(StallError, match=r"episode worker 0, process \d+") as caught, watch(), waits("step"):
        raise ValueError("no episode can be trained on")
    assert str(caught.value).endswith("The wait ended with ValueError: no episode can be trained on")


@pytest.mark.parametrize("error", [_worker_error(), ValueError("no timeout")])
def test_other_errors_are_not_reported_as_a_stall(watch, waits, error):
    with pytest.raises(type(error)) as caught, watch(), waits("update"):
        raise error
    assert caught.value is error
    assert not watch.report.exists()


def test_signal_writes_a_report_and_the_run_continues(watch, waits, terminal):
    with watch():
        for number in range(1, 3):
            with waits("update"):
                os.kill(os.getpid(), signal.SIGUSR1)
                while terminal.getvalue().count("stall.txt") < number:
                    pass
    assert "waiting for the update since" in terminal.getvalue()
    report = watch.report.read_text()
    assert report.count("requested by SIGUSR1") == 2
    newest, older = report.split("=" * 80)
    assert "the update: ended" in newest.split("Last progress")[1]
    assert "no wait has ended yet" in older.split("Last progress")[1]
    assert "test_signal_writes_a_report_and_the_run_continues" in newest.split("Stack traces")[1]


def test_watch_continues_after_an_error_of_its_own_and_shows_it_once(waits, tmp_path, progress, terminal, monkeypatch):
    calls = []

    def fail():
        calls.append(None)
        raise KeyError("count")

    monkeypatch.setattr("tidemill_trainer.stalls.watch._POLL_S", 0.01)
    with Watch(waits, tmp_path, progress, each_second=fail)():
        while len(calls) < 3:
            pass
    assert terminal.getvalue().count("the watch over the run failed with KeyError: 'count'; it continues") == 1


def test_handler_of_the_signal_is_restored(watch):
    before = signal.getsignal(signal.SIGUSR1)
    with watch():
        assert signal.getsignal(signal.SIGUSR1) is not before
    assert signal.getsignal(signal.SIGUSR1) is before
