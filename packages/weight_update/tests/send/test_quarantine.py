"""Engines that missed an update or hold a mix of versions: which updates include them."""

import pytest
import torch
from lora_engine import CONFIG, adapter
from tidemill_weight_update import WeightUpdater
from toy_engines import ToyEngine, as_mode, holds, tensors

PART = "temperature"


class DownEngine(ToyEngine):
    """Engine whose server is down while `is_down` is set."""

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
def test_partial_update_is_refused_while_engine_is_mixed(mode):
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


def test_partial_update_skips_engine_that_missed_an_update():
    late, good = DownEngine(1, "late"), ToyEngine(1, "good")
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


class AdapterEngine(DownEngine):
    """Engine that keeps a list of the names of its adapters."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.names: list[str] = []

    def adapters(self) -> list[str]:
        return list(self.names)

    def load_adapter(self, name, config, bucket) -> None:
        self.names.append(name)

    def unload_adapter(self, name) -> None:
        self.names.remove(name)


def test_engine_stays_quarantined_until_an_update_succeeds():
    late, good = AdapterEngine(1, "late"), AdapterEngine(1, "good")
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


def leave_paused(engine: ToyEngine) -> None:
    """Update with an updater that fails in the middle and is closed; the engine stays paused."""
    updater = WeightUpdater([engine], bucket_bytes=100)
    updater.update(tensors(0).items(), 0)
    with pytest.raises(ValueError, match="NaN elements"):
        updater.update(iter(not_finite().items()), 1)
    updater.close()
    assert engine.calls[-1] == "pause abort"


@pytest.mark.parametrize("in_flight", ["wait", "abort", "retract", "in_place"])
def test_next_updater_resumes_an_engine_that_the_last_one_left_paused(in_flight):
    engine, other = AdapterEngine(2), AdapterEngine(1)
    leave_paused(engine)
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


class EngineWithoutPausedAttribute(ToyEngine):
    """Client without the attribute `paused`."""

    def __init__(self) -> None:
        super().__init__(1)
        del self.paused

    def pause(self, mode) -> None:
        self.calls.append(f"pause {mode}")

    def resume(self) -> None:
        self.calls.append("resume")


def test_engine_with_unknown_pause_state_is_not_resumed():
    engine = EngineWithoutPausedAttribute()
    leave_paused(engine)
    updater = WeightUpdater([engine])
    updater.update(tensors(3).items(), 3)
    assert engine.version == "3"
    assert "resume" not in engine.calls
    updater.close()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_engine_paused_by_the_user_stays_paused(mode):
    engine = ToyEngine(1)
    engine.pause(mode)
    updater = WeightUpdater([engine])
    updater.update(tensors(1).items(), 1)
    updater.update(dict([tensors(2).popitem()]).items(), 2, partial=True)
    assert (engine.version, engine.paused) == ("2", mode)
    updater.close()


def test_refused_engine_is_not_part_of_later_updates():
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
