"""Engines that failed are excluded until they are readmitted, by this updater or another one."""

import os
from collections.abc import Callable

import pytest
import torch
from sources import WithEvent, fail
from tidemill_weight_update import WeightUpdater
from toy_engines import ToyEngine, as_mode, holds, tensors


class DownEngine(ToyEngine):
    """Engine whose server is down while `is_down` is set."""

    is_down = False

    def load(self, request, *, flush_cache):
        if self.is_down:
            raise ConnectionError("connection refused")
        super().load(request, flush_cache=flush_cache)


def not_finite() -> dict[str, torch.Tensor]:
    checkpoint = tensors(1)
    checkpoint["norm.weight"][0] = torch.nan
    return checkpoint


def leave_mixed(engine: ToyEngine) -> WeightUpdater:
    """Return an updater that failed after the engine had loaded some tensors, so that the engine is paused."""
    updater = WeightUpdater([engine], bucket_bytes=100)
    updater.update(tensors(0).items(), 0)
    with pytest.raises(ValueError, match="NaN elements"):
        updater.update(iter(not_finite().items()), 1)
    assert engine.calls[-1] == "pause abort"
    return updater


@pytest.mark.parametrize("mode", ["collection", "function"])
@pytest.mark.parametrize("partial", [True, False])
def test_mixed_engine_is_excluded_and_paused_until_it_is_readmitted(mode, partial):
    engine = ToyEngine(2)
    updater = leave_mixed(engine)
    with pytest.raises(RuntimeError, match=r"all engines are excluded .*engine 0 of 1 \(toy\): .*the trainer failed"):
        updater.update(as_mode(tensors(2), mode), 2, partial=partial)
    assert (engine.paused, engine.version) == ("abort", "0")
    assert updater.readmit([engine], as_mode(tensors(3), mode), 3).quarantined == {}
    part = {"temperature": tensors(4)["temperature"]}
    updater.update(as_mode(part, mode), 4, partial=True)
    assert holds(engine, tensors(3) | part)
    assert (engine.paused, engine.version) == (None, "4")
    updater.close()


def test_engine_that_missed_an_update_is_excluded_until_a_readmission_succeeds():
    late, good = DownEngine(1, "late"), ToyEngine(1, "good")
    updater = WeightUpdater([late, good])
    updater.update(tensors(0).items(), 0)
    late.is_down = True
    assert list(updater.update(tensors(1).items(), 1).quarantined) == ["engine 0 of 2 (late)"]
    with pytest.raises(RuntimeError, match=r"^engine 0 of 1 \(late\): connection refused$"):
        updater.readmit([late], tensors(1).items(), 1)
    late.is_down = False
    with pytest.raises(ValueError, match="an empty iterable"):
        updater.readmit([late], [], 1)
    assert updater.update(tensors(2).items(), 2).quarantined == {}
    assert (late.version, good.version) == ("0", "2")
    assert updater.readmit([late], tensors(2).items(), 2).quarantined == {}
    assert updater.update(tensors(3).items(), 3).quarantined == {}
    assert (late.version, good.version) == ("3", "3")
    assert holds(late, tensors(3))
    updater.close()


@pytest.mark.parametrize("in_flight", ["wait", "abort", "retract", "in_place"])
def test_another_updater_resumes_an_engine_that_it_readmits(in_flight):
    engine, other = ToyEngine(2), ToyEngine(1)
    leave_mixed(engine).close()
    updater = WeightUpdater([engine, other], bucket_bytes=100, in_flight=in_flight)
    assert updater.readmit([engine, other], tensors(3).items(), 3).quarantined == {}
    assert (engine.paused, engine.version) == (None, "3")
    assert holds(engine, tensors(3))
    updater.close()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_engine_paused_by_the_user_stays_paused(mode):
    engine = ToyEngine(1)
    engine.pause(mode)
    updater = WeightUpdater([engine])
    updater.update(tensors(1).items(), 1)
    assert (engine.version, engine.paused) == ("1", mode)
    updater.close()


def test_engine_whose_readmission_fails_is_not_part_of_later_updates():
    known, new = ToyEngine(1, "known"), ToyEngine(1, "new")
    updater = WeightUpdater([known])
    updater.update(tensors(0).items(), 0)
    new.tp_size = 257
    with pytest.raises(ValueError, match="at most 256 engine ranks, got 257"):
        updater.readmit([new], tensors(1).items(), 1)
    new.tp_size = 1
    assert updater.update(tensors(1).items(), 1).quarantined == {}
    assert (known.version, new.version, new.requests) == ("1", "first", [])
    updater.close()


class UpdatedTwice(ToyEngine):
    """Calls `meanwhile` once between the load and the version."""

    meanwhile: Callable[[], object] | None = None

    def set_weight_version(self, version: str) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        super().set_weight_version(version)


def test_second_updater_is_refused_until_the_first_one_has_ended():
    engine = UpdatedTwice(2)
    first, second = WeightUpdater([engine], bucket_bytes=300), WeightUpdater([engine], bucket_bytes=300)
    second.update(tensors(0).items(), "second")
    first.update(tensors(1).items(), "first")
    message = rf"rank 0, 1: RuntimeError: another WeightUpdater \(process {os.getpid()}\) is updating this engine; wait"

    def meanwhile() -> None:
        with pytest.raises(RuntimeError, match=message):
            second.update(tensors(2).items(), "second")

    engine.meanwhile = meanwhile
    assert first.update(tensors(3).items(), "first again").verified
    assert engine.version == "first again"
    assert holds(engine, tensors(3))
    assert second.update(tensors(4).items(), "second again").verified  # it is not excluded
    assert holds(engine, tensors(4))
    assert first.update(tensors(5).items(), "last").verified
    first.close()
    second.close()


def test_updater_that_has_failed_does_not_count():
    engine = ToyEngine()
    first = WeightUpdater([engine], bucket_bytes=100)
    with pytest.raises(KeyError):
        first.update(WithEvent(tensors(0).items(), 8, fail(KeyError("lost"))), 0)
    second = WeightUpdater([engine], bucket_bytes=300)
    assert second.readmit([engine], tensors(1).items(), 1).verified
    assert holds(engine, tensors(1))
    first.close()
    second.close()
