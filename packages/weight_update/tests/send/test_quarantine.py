"""Engines that are behind: what brings them up to date, and what does not."""

import pytest
import torch
from lora_engine import CONFIG, adapter
from tidemill_weight_update import WeightUpdater
from toy_engines import ToyEngine, as_mode, holds, tensors

PART = "temperature"


class Down(ToyEngine):
    """Its server is down when `is_down` says so."""

    is_down = False

    def load(self, request, *, flush_cache):
        if self.is_down:
            raise ConnectionError("connection refused")
        super().load(request, flush_cache=flush_cache)


def part(seed: int) -> dict[str, torch.Tensor]:
    return {PART: tensors(seed)[PART]}


def not_finite() -> dict[str, torch.Tensor]:
    checkpoint = tensors(1)
    checkpoint["norm.weight"][0] = torch.nan
    return checkpoint


@pytest.mark.parametrize("mode", ["complete", "streaming"])
def test_a_mix_of_versions_is_not_ended_by_a_part(mode):
    engine = ToyEngine(2)
    updater = WeightUpdater([engine], bucket_bytes=100)
    updater.update(tensors(0).items(), 0)
    with pytest.raises(ValueError, match="NaN elements"):
        updater.update(iter(not_finite().items()), 1)
    assert engine.paused == "abort"
    with pytest.raises(ValueError, match=r"engine 0 of 1 \(toy\) failed in update\(\) .*that may be outdated"):
        updater.update(as_mode(part(2), mode), 2, partial=True)
    assert (engine.paused, engine.version) == ("abort", "0")
    updater.update(tensors(3).items(), 3)
    updater.update(as_mode(part(4), mode), 4, partial=True)
    assert holds(engine, tensors(3) | part(4))
    assert (engine.paused, engine.version) == (None, "4")
    updater.close()


def test_an_engine_that_missed_an_update_is_left_out_of_a_part():
    late, good = Down(1, "late"), ToyEngine(1, "good")
    updater = WeightUpdater([late, good])
    updater.update(tensors(0).items(), 0)
    late.is_down = True
    assert list(updater.update(tensors(1).items(), 1).quarantined) == ["engine 0 of 2 (late)"]
    late.is_down = False
    assert updater.update(part(2).items(), 2, partial=True).quarantined == {}
    assert (late.version, good.version) == ("0", "2")
    assert holds(late, tensors(0))
    assert holds(good, tensors(1) | part(2))
    everything = tensors(1) | part(2)
    assert updater.update(everything.items(), 2, partial=True, engines=[late]).quarantined == {}
    assert (late.version, late.paused) == ("2", None)
    assert holds(late, everything)
    assert updater.update(part(3).items(), 3, partial=True).quarantined == {}
    assert (late.version, good.version) == ("3", "3")
    updater.close()


class Adapted(Down):
    """Has a list of adapters for what it is given."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.names: list[str] = []

    def adapters(self) -> list[str]:
        return list(self.names)

    def load_adapter(self, name, config, bucket) -> None:
        self.names.append(name)

    def unload_adapter(self, name) -> None:
        self.names.remove(name)


def test_an_engine_that_does_not_catch_up_stays_behind():
    late, good = Adapted(1, "late"), Adapted(1, "good")
    updater = WeightUpdater([late, good])
    updater.update(tensors(0).items(), 0)
    late.is_down = True
    assert list(updater.update(tensors(1).items(), 1).quarantined) == ["engine 0 of 2 (late)"]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^engine 0 of 1 \(late\): connection refused$"):
            updater.update(tensors(1).items(), 1, engines=[late])
        assert updater.update_adapter(adapter(2), "policy", CONFIG, 2).quarantined == {}
        assert (late.names, late.version) == ([], "0")
        assert (good.names, good.version) == (["policy"], "2")
    late.is_down = False
    assert updater.update(tensors(1).items(), 1, engines=[late]).quarantined == {}
    assert updater.update_adapter(adapter(2), "policy", CONFIG, 2, engines=[late]).quarantined == {}
    assert (late.names, late.version) == (["policy"], "2")
    assert holds(late, tensors(1))
    assert updater.update_adapter(adapter(3), "policy", CONFIG, 3).quarantined == {}
    assert (late.version, good.version) == ("3", "3")
    updater.close()


def left_paused(engine: ToyEngine) -> None:
    """By an updater that was closed, in an update that ended half way."""
    updater = WeightUpdater([engine], bucket_bytes=100)
    updater.update(tensors(0).items(), 0)
    with pytest.raises(ValueError, match="NaN elements"):
        updater.update(iter(not_finite().items()), 1)
    updater.close()
    assert engine.calls[-1] == "pause abort"


@pytest.mark.parametrize("in_flight", ["wait", "abort", "retract", "in_place"])
def test_what_one_updater_paused_goes_on_when_the_next_has_updated_it(in_flight):
    engine, other = Adapted(2), Adapted(1)
    left_paused(engine)
    updater = WeightUpdater([engine, other], bucket_bytes=100, in_flight=in_flight)
    with pytest.raises(ValueError, match=r"engine 0 of 2 \(toy\) failed in update\(\) or is still paused"):
        updater.update(part(2).items(), 2, partial=True)
    with pytest.raises(ValueError, match=r"engine 0 of 2 \(toy\) failed in update\(\) or is still paused"):
        updater.update_adapter(adapter(2), "policy", CONFIG, 2)
    engine.is_down = True
    assert list(updater.update(tensors(2).items(), 2).quarantined) == ["engine 0 of 2 (toy)"]
    assert (engine.paused, other.paused) == ("abort", None)
    assert engine.calls.count("pause abort") == 1
    engine.is_down = False
    assert updater.update(tensors(3).items(), 3, engines=[engine, other]).quarantined == {}
    assert (engine.paused, engine.version) == (None, "3")
    assert holds(engine, tensors(3))
    updater.close()


class Unknown(ToyEngine):
    """Nobody can ask its client whether it has paused it."""

    def __init__(self) -> None:
        super().__init__(1)
        del self.paused

    def pause(self, mode) -> None:
        self.calls.append(f"pause {mode}")

    def resume(self) -> None:
        self.calls.append("resume")


def test_an_engine_that_somebody_else_may_have_paused_is_left_as_it_is():
    engine = Unknown()
    left_paused(engine)
    updater = WeightUpdater([engine])
    updater.update(tensors(3).items(), 3)
    assert engine.version == "3"
    assert "resume" not in engine.calls
    updater.close()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_what_the_user_has_paused_stays_so(mode):
    engine = ToyEngine(1)
    engine.pause(mode)
    updater = WeightUpdater([engine])
    updater.update(tensors(1).items(), 1)
    updater.update(dict([tensors(2).popitem()]).items(), 2, partial=True)
    assert (engine.version, engine.paused) == ("2", mode)
    updater.close()


def test_an_engine_that_was_refused_takes_no_part_in_later_updates():
    known, new = ToyEngine(1, "known"), ToyEngine(1, "new")
    updater = WeightUpdater([known])
    updater.update(tensors(0).items(), 0)
    new.tp_size = 257
    with pytest.raises(ValueError, match="one update supports at most 256 engine ranks, got 257"):
        updater.update(tensors(1).items(), 1, engines=[new])
    new.tp_size = 1
    assert updater.update(tensors(1).items(), 1).quarantined == {}
    assert (known.version, new.version, new.requests) == ("1", "first", [])
    updater.update(tensors(2).items(), 2, engines=[new])
    updater.update(tensors(3).items(), 3)
    assert (known.version, new.version) == ("3", "3")
    updater.close()
