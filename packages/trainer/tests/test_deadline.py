import re
import signal
import threading
import time

import pytest
from tidemill_trainer.deadline import DeadlineError, deadline


def test_block_within_its_deadline_is_not_interrupted_later():
    with deadline(0.05):
        pass
    time.sleep(0.1)  # the alarm is disarmed


def test_block_is_interrupted_at_its_deadline():
    with pytest.raises(DeadlineError, match=r"^no result within 0\.05 s$"), deadline(0.05):
        threading.Event().wait()


def test_alarm_of_other_code_is_restored():
    def handler(*_):
        pass

    previous_handler = signal.signal(signal.SIGALRM, handler)
    previous, _ = signal.setitimer(signal.ITIMER_REAL, 20_000, 7)  # pytest-timeout may have an alarm
    try:
        with deadline(10):
            assert signal.getsignal(signal.SIGALRM) is not handler
        remaining, interval = signal.getitimer(signal.ITIMER_REAL)
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.signal(signal.SIGALRM, previous_handler)
        signal.setitimer(signal.ITIMER_REAL, previous)
    assert 10_000 < remaining < 20_000
    assert interval == 7


def test_other_thread_is_rejected_unless_the_deadline_is_infinite():
    seen = []

    def work():
        with deadline(float("inf")):
            seen.append("done")
        try:
            with deadline(1.0):
                seen.append("never")
        except RuntimeError as error:
            seen.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[0] == "done"
    assert re.fullmatch(
        r"a deadline of 1 s requires the main thread, got thread 'Thread-\d+ \(work\)'; call it .*", seen[1]
    )
