import pytest
from tidemill_trainer.stalls.process import Registration, observe
from tidemill_trainer.stalls.stack import stack_trace


@pytest.fixture
def forbidden(tmp_path):
    """A py-spy that the system does not permit to read other processes."""
    command = tmp_path / "py-spy"
    command.write_text("#!/bin/sh\necho 'Error: Permission Denied' >&2\nexit 1\n")
    command.chmod(0o755)
    return command


@pytest.mark.parametrize("stopped", [False, True])
def test_py_spy_shows_where_a_process_is_stuck(endless, tmp_path, stopped):
    [state] = observe([endless("actor_0", stopped=stopped)])
    trace = stack_trace(state, tmp_path)
    assert trace.startswith("(py-spy)\nThread ")
    assert "endless_loop" in trace


def test_process_writes_its_own_traces_where_py_spy_is_not_permitted(endless, tmp_path, forbidden):
    [state] = observe([endless("actor_0", traces=True)])
    trace = stack_trace(state, tmp_path, forbidden)
    assert trace.startswith("(py-spy failed: Error: Permission Denied)\n(faulthandler)\n")
    assert "in endless_loop" in trace


def test_process_without_a_handler_survives_the_request_for_its_traces(endless, tmp_path, forbidden):
    registration = endless("actor_0")
    [state] = observe([registration])
    assert stack_trace(state, tmp_path, forbidden).endswith("no stack trace: the process does not write it itself")
    assert len(observe([registration])) == 1


def test_stopped_process_is_not_asked_for_its_traces(endless, tmp_path, forbidden):
    [state] = observe([endless("actor_0", traces=True, stopped=True)])
    assert stack_trace(state, tmp_path, forbidden).endswith("no stack trace: a stopped process cannot write it itself")


def test_driver_writes_its_own_traces_where_py_spy_is_missing(tmp_path):
    state = next(state for state in observe([Registration.of_this_process("driver")]) if state.title == "driver")
    trace = stack_trace(state, tmp_path, tmp_path / "missing")
    assert "missing" in trace.splitlines()[0]
    assert "in test_driver_writes_its_own_traces_where_py_spy_is_missing" in trace
