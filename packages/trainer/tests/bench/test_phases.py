import pytest
from tidemill_trainer.bench.phases import Spread, phase_seconds, shares

LINE = {
    "timing_s/step": 10.0,
    "timing_s/gen": 5.0,
    "timing_s/old_log_prob": 0.5,
    "timing_s/adv": 0.1,
    "timing_s/update_actor": 3.0,
    "timing_s/update_weights": 0.4,
    "weight_update/seconds": 0.3,
    "episode/seconds/p90": 3.5,
    "episode/seconds/max": 4.0,
    "perf/step_s/actor": 2.5,
    "perf/forward_s/actor": 0.7,
    "perf/backward_s/actor": 1.4,
    "perf/optimizer_s/actor": 0.2,
}
TURNS = {"rollout/resume_s": 0.2, "rollout/release_s": 0.3, "perf/offload_s/actor": 0.15}


@pytest.mark.parametrize("more", [{}, TURNS, {"timing_s/save_batch": 0.25}, TURNS | {"weight_update/offload_s": 0.06}])
@pytest.mark.parametrize("overlaps", [True, False])
def test_phases_add_up_to_the_wall_time(more, overlaps):
    phases = phase_seconds(LINE | more, 10.2, overlaps=overlaps)
    assert sum(phases.values()) == pytest.approx(10.2)
    assert min(phases.values()) > 0


def test_turns_are_no_part_of_generation_and_weight_update():
    apart, turns = (phase_seconds(line, 10.2, overlaps=False) for line in (LINE, LINE | TURNS))
    assert apart["generation"] == pytest.approx(4.5)
    assert apart["waiting for the last episodes"] == pytest.approx(0.5)
    assert (apart["weight update"], turns["weight update"]) == (0.4, 0.3)
    assert turns["generation"] == pytest.approx(4.0)
    assert turns["onload and offload of the engines"] == pytest.approx(0.2 + 0.3 + 0.1)
    assert turns["onload and offload of the trainer"] == 0.15
    assert apart["rest of the update"] == pytest.approx(0.7)
    assert turns["other"] == apart["other"] == pytest.approx(10.2 - 5.0 - 0.5 - 0.1 - 3.0 - 0.4)


def test_offload_after_a_weight_update_is_no_part_of_it():
    before, after = (
        phase_seconds(LINE | TURNS | {"weight_update/offload_s": seconds}, 10.2, overlaps=False)
        for seconds in (0.0, 0.06)
    )
    changed = {name: after[name] - before[name] for name in before if after[name] != pytest.approx(before[name])}
    assert changed == pytest.approx(
        {"onload and offload of the trainer": 0.06, "onload and offload of the engines": -0.06}
    )


def test_megatron_has_one_part_for_forward_and_backward():
    line = {name: value for name, value in LINE.items() if "ward_s" not in name} | {
        "perf/forward_backward_s/actor": 2.0
    }
    phases = phase_seconds(line, 10.2, overlaps=False)
    assert phases["forward and backward pass"] == 2.0
    assert not {"forward pass", "backward pass"} & phases.keys()


def test_an_engine_without_parts_has_one_update():
    line = {name: value for name, value in LINE.items() if not name.startswith("perf/")}
    assert phase_seconds(line, 10.2, overlaps=False)["rest of the update"] == 3.0


def test_update_of_the_critic_is_not_idle_time():
    phases = phase_seconds(LINE | {"timing_s/update_critic": 0.5}, 10.2, overlaps=False)
    assert (phases["update of the critic"], phases["rest of the update"]) == (0.5, pytest.approx(0.2))


def test_waiting_is_no_more_than_generation():
    phases = phase_seconds(LINE | {"episode/seconds/max": 60.0}, 10.2, overlaps=False)
    assert (phases.get("generation"), phases["waiting for the last episodes"]) == (None, 5.0)


def test_shares_add_up_to_one_in_descending_order():
    found = shares([{"a": 1.0, "b": 2.0}, {"b": 4.0, "c": 1.0}])
    assert list(found) == ["b", "a", "c"]
    assert found["b"] == pytest.approx(0.75)
    assert sum(found.values()) == pytest.approx(1.0)


def test_spread():
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(min=1.0, median=2.5, max=10.0)
