import numpy as np
import pytest
import torch
from tidemill_dataproto import DataProto
from tidemill_trainer.staleness import StalenessError, check_staleness, staleness_of


def _batch(*versions):
    column = np.empty(len(versions), dtype=object)
    column[:] = versions
    return DataProto.from_dict({"episode": torch.arange(len(versions)) + 10}, {"versions": column})


def test_each_token_has_the_age_of_its_version():
    batch = _batch([("3", 2), ("5", 1)], [], [("4", 3)])
    assert staleness_of(batch, 5).tolist() == [2, 2, 0, 1, 1, 1]
    assert staleness_of(batch, 5, of_keys=True).tolist() == [2, 2, 2, 1, 1, 1]
    metrics = check_staleness(batch, 5, 2)
    assert metrics == {
        "staleness/mean": pytest.approx(7 / 6),
        "staleness/max": 2.0,
        "staleness/mixed_rows": pytest.approx(1 / 3),
    }


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ([("3", 1)], "row 1, of episode 11, has a token of weight version 3, and version 5 is trained"),
        ([("5", 1), ("6", 1)], "has a token of weight version 6, and version 5 is trained"),
    ],
)
def test_tokens_outside_the_bound_are_errors(versions, message):
    with pytest.raises(StalenessError, match=message):
        check_staleness(_batch([("4", 9)], versions), 5, 1)


def test_batch_without_tokens_has_no_age():
    assert check_staleness(_batch([]), 5, 0)["staleness/max"] == 0.0
