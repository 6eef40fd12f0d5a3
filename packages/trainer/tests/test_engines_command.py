"""`tidemill engines` without a run that answers."""

import fcntl

import pytest
from tidemill_trainer.cli import main
from tidemill_trainer.rollout.engine_requests import EngineRequestError, EngineRequests, send


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["add", "0"], "expected a number >= 1 after `add`, got '0'"),
        (["add", "rollout_1"], "expected a number >= 1 after `add`, got 'rollout_1'"),
        (["remove", "0"], "expected a number >= 1 or the name of an engine after `remove`, got '0'"),
        ([], "which has no run in it; name it as in `tidemill engines runs/NAME`"),
    ],
)
def test_wrong_arguments_are_one_error(tmp_path, capsys, args, message):
    assert main(["engines", str(tmp_path), *args]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing", "missing, which is not a folder; name it as"), ("x" * 300, "File name too long")],
)
def test_path_that_is_no_folder_is_one_error(tmp_path, capsys, name, message):
    assert main(["engines", str(tmp_path / name), "add"]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_run_that_is_not_running_or_has_no_engines_is_an_error(tmp_path, capsys):
    lock = tmp_path / "lock"
    lock.touch()
    assert main(["engines", str(tmp_path)]) == 1
    assert "is not running" in capsys.readouterr().err
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["engines", str(tmp_path)]) == 1
    assert "the run has no engines, or has not started them" in capsys.readouterr().err


def test_answers_arrive_in_order_and_leave_no_files(tmp_path):
    requests = EngineRequests(tmp_path / "requests")
    requests.open()
    answers = send(tmp_path / "requests", "add", count=2, name=None, is_running=lambda: _answer(requests))
    assert list(answers) == [("accepted", None), ("one", None), ("two", 0)]
    assert list((tmp_path / "requests").iterdir()) == []


def _answer(requests):
    for request in requests.receive():
        assert (request.action, request.count, request.name) == ("add", 2, None)
        request.pending.update("ab")
        request.answer("accepted")
        request.settle("a", "one")
        request.settle("b", "two")
    return True


def test_end_of_the_run_ends_the_wait(tmp_path):
    requests = EngineRequests(tmp_path / "requests")
    requests.open()
    (tmp_path / "requests" / "old.request").write_text("{}")
    requests.open()  # without requests to an earlier attempt
    answers = send(tmp_path / "requests", "remove", count=1, name="rollout_1", is_running=lambda: False)
    with pytest.raises(EngineRequestError, match="the run ended or started again before"):
        list(answers)


def test_run_that_starts_again_ends_the_wait(tmp_path):
    requests = EngineRequests(tmp_path / "requests")
    requests.open()

    def is_running():
        requests.close()
        return True

    with pytest.raises(EngineRequestError, match="the run ended or started again before"):
        list(send(tmp_path / "requests", "add", count=1, name=None, is_running=is_running))


def test_answer_to_an_interrupted_command_creates_no_file(tmp_path):
    requests = EngineRequests(tmp_path / "requests")
    requests.open()
    found = []

    def is_running():
        found.extend(requests.receive())
        return False

    with pytest.raises(EngineRequestError):
        list(send(tmp_path / "requests", "add", count=1, name=None, is_running=is_running))
    [request] = found
    request.answer("too late")
    assert list((tmp_path / "requests").iterdir()) == []
