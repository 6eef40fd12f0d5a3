import re
import signal
import threading
import time

import pytest
from tidemill_trainer.deadline import DeadlineError, deadline


def test_a_block_in_time_is_left_alone():
    with deadline(0.05):
        pass
    time.sleep(0.1)  # nothing is armed any more


def test_the_block_is_interrupted_where_it_is():
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"no result within 0\.05 s"), deadline(0.05):
        threading.Event().wait(30)
    assert time.monotonic() - started < 10


def test_an_alarm_of_somebody_else_still_comes():
    rang = []
    usual = signal.signal(signal.SIGALRM, lambda *_: rang.append(time.monotonic()))
    others, _ = signal.setitimer(signal.ITIMER_REAL, 0.3)  # pytest-timeout's, perhaps
    started = time.monotonic()
    try:
        with deadline(10):
            time.sleep(0.05)
        time.sleep(0.5)
    finally:
        signal.signal(signal.SIGALRM, usual)
        signal.setitimer(signal.ITIMER_REAL, others)
    assert len(rang) == 1
    assert rang[0] - started >= 0.3


def test_another_thread_is_refused_unless_there_is_no_deadline():
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
