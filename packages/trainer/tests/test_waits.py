from pathlib import Path

import pytest
from tidemill_engines.config import ModelConfig
from tidemill_trainer.config import Config
from tidemill_trainer.waits import Limit, Wait, Waits, waits_of

_PAGE = (Path(__file__).parents[1] / "docs/running.md").read_text()


@pytest.fixture
def waits():
    return Waits({"step": Wait(name="the step", on="its phases"), "update": Wait(name="the update", on="workers")})


def test_documents_list_every_wait_with_its_limits():
    table = _PAGE.split("## Waits\n", 1)[1].split("\n## ", 1)[0]
    waits = waits_of(Config(model=ModelConfig(path="m")))
    for phase in waits.keys() - {"step", "adv"}:  # the driver does not wait for another process
        assert waits[phase].name in table, phase
        for limit in waits[phase].limits:
            assert limit.key == "fixed" or f"`{limit.key}`" in table, limit


def test_longest_expired_limit_is_named():
    limits = tuple(Limit(key=f"{seconds}.timeout_s", seconds=seconds) for seconds in (10, 20))
    wait = Wait(name="the update", on="workers", limits=limits, worker_limit=Limit(key="part", seconds=5))
    assert wait.limit_after(25) == "limit 20.timeout_s = 20 s"
    assert wait.limit_after(7) == "limit part = 5 s"
    assert wait.limit_after(1) == "limit 10.timeout_s = 10 s or 20.timeout_s = 20 s or part = 5 s"
    assert Wait(name="advantages", on="the driver").limit_after(1) == "no limit"


def test_active_waits_are_listed_from_the_outermost_one(waits):
    assert waits.last_progress() == "no wait has ended yet"
    with waits("step"), waits("update"):
        assert [active.wait.name for active in waits.active()] == ["the step", "the update"]
    assert waits.active() == ()
    assert waits.last_progress().startswith("the step: ended ")


def test_failed_waits_are_known_only_for_their_error(waits):
    error = KeyError("a")
    with pytest.raises(KeyError), waits("step"), waits("update"):
        raise error
    assert [active.wait.name for active in waits.active_at(error)] == ["the step", "the update"]
    assert waits.active_at(KeyError("b")) == ()
    assert waits.active() == ()
