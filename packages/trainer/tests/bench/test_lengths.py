import json

import pytest
from tidemill_rollout import SamplingParams
from tidemill_trainer.bench.lengths import parse_lengths
from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.metrics import QUANTILES
from tidemill_trainer.rollout.episode_worker import with_length


@pytest.mark.parametrize(("mean", "longest"), [(1000, 4096), (4000, 8192), (1, 2), (600, 8192)])
def test_lognormal_lengths_have_the_mean_and_the_maximum(mean, longest):
    lengths = parse_lengths(f"lognormal:{mean},{longest}")
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.01, abs=0.5)
    assert 1 <= min(lengths) <= max(lengths) <= longest
    assert lengths == sorted(lengths)


def test_fixed_lengths_and_lengths_of_a_file(tmp_path):
    assert parse_lengths("512") == [512]
    (tmp_path / "lengths.txt").write_text("5\n7\n5\n")
    assert parse_lengths(str(tmp_path / "lengths.txt")) == [5, 7, 5]


def test_lengths_of_a_run_have_its_percentiles(tmp_path):
    known = {f"p{percent}": 10.0 * percent for percent in QUANTILES} | {"min": 5.0, "max": 1000.0}
    rows = [{"response_length/" + name: value * factor for name, value in known.items()} for factor in (0.5, 1.5)]
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps(row) for row in [{"step": 0, "val/accuracy": 0.5}, dict.fromkeys(rows[0]), *rows]]
    file.write_text("\n".join([*lines, '{"step": 3, "resp']))  # a killed run
    lengths = parse_lengths(str(file))
    for percent in QUANTILES:
        assert lengths[len(lengths) * percent // 100] == pytest.approx(10 * percent, abs=3)
    assert 5 <= lengths[0] < 10
    assert 990 < lengths[-1] <= 1000


@pytest.mark.parametrize("text", ["0", "lognormal:5", "lognormal:9,9", "lognormal:a,b", "missing", "missing.jsonl", ""])
def test_other_lengths_are_refused(text):
    with pytest.raises(ConfigError, match="--lengths must"):
        parse_lengths(text)


def test_metrics_without_percentiles_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="no step has the metrics"):
        parse_lengths(str(tmp_path / "metrics.jsonl"))


def test_seed_selects_the_length_of_an_episode():
    sampling = SamplingParams(max_tokens=512, temperature=0.5)
    lengths = [7, 8, 9]
    found = [with_length(sampling, lengths, seed) for seed in range(4)]
    assert [each.max_tokens for each in found] == [7, 8, 9, 7]
    assert all(each.extra == {"ignore_eos": True} and each.temperature == 0.5 for each in found)
    assert with_length(sampling, (), 3) is with_length(sampling, lengths, None) is sampling
