"""Errors between processes."""

import copy
import pickle

import pytest
from tidemill_dispatch import CallTimeoutError, WorkerDiedError, WorkerError

ERRORS = [
    WorkerError(
        group="g",
        rank=1,
        host="h:2",
        method="m",
        error_type="ValueError",
        error_message="no",
        remote_traceback="Traceback",
        other_errors=("rank 0: KeyError: x",),
        still_running=(3,),
    ),
    WorkerDiedError(group="g", rank=1, host="h:2", method="m", reason="killed"),
    CallTimeoutError(group="g", method="m", timeout_s=0.5, still_running=(0, 2)),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("through", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_keep_text_and_attributes_when_pickled(error, through):
    error.add_note("in step 7")
    restored = through(error)
    assert type(restored) is type(error)
    assert (str(restored), restored.args) == (str(error), error.args)
    assert vars(restored) == vars(error)
