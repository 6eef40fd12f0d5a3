import json

import pytest
from tidemill_engines import ModelConfig
from tidemill_trainer.bench.decode import decode_bytes, peak_bandwidth
from tidemill_trainer.bench.shapes import SHAPES
from tidemill_trainer.cli import BENCH_CONFIG
from tidemill_trainer.config_file import load_config
from tidemill_trainer.plan.model import count_model

NUM_PARAMETERS = {  # as published with the models
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
}


@pytest.fixture
def sizes(tmp_path):
    def count(name):
        (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
        return count_model(ModelConfig(path=str(tmp_path)))

    return count


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_parameters_of_the_published_models(name, sizes):
    assert sizes(name).total == NUM_PARAMETERS[name]


def read(sizes, *overrides, **metrics):
    line = {"prompt_length/mean": 128.0, "response_length/mean": 512.0, "response_length/max": 512.0}
    line |= {"response_length/std": 0.0} | metrics
    return decode_bytes(load_config(BENCH_CONFIG, overrides), sizes, line, 512 * 512)


def test_bytes_of_equal_responses_are_counted_token_by_token(sizes):
    weights = 512 * 2 * NUM_PARAMETERS["qwen3-0.6b"]
    cache = 512 * sum(128 + position for position in range(1, 513)) * 2 * 28 * 8 * 128 * 2
    assert read(sizes("qwen3-0.6b")) == pytest.approx(weights + cache)


def test_bytes_of_different_responses_are_counted_token_by_token(sizes):
    lengths = [100, 300] * 4  # the mean is 200, the standard deviation 100
    line = {"response_length/mean": 200.0, "response_length/std": 100.0, "response_length/max": 300.0}
    line["prompt_length/mean"] = 50.0
    weights = 300 * 2 * (NUM_PARAMETERS["qwen3-8b"] - 151936 * 4096)  # the embedding is not read as a whole
    cache = sum(50 + position for length in lengths for position in range(1, length + 1)) * 2 * 36 * 8 * 128 * 2
    found = decode_bytes(load_config(BENCH_CONFIG), sizes("qwen3-8b"), line, sum(lengths))
    assert found == pytest.approx(weights + cache)


def test_a_kv_cache_in_float8_has_half_the_bytes(sizes):
    model = sizes("qwen3-0.6b")
    weights = 512 * 2 * model.total
    saved = read(model) - read(model, 'rollout.engine_args.kv_cache_dtype="fp8_e4m3"')
    assert saved == pytest.approx((read(model) - weights) / 2)


def test_each_engine_reads_the_weights(sizes):
    model = sizes("qwen3-0.6b")
    more = read(model, "rollout.num_engines=2") - read(model)
    assert more == pytest.approx(512 * 2 * NUM_PARAMETERS["qwen3-0.6b"])


def test_experts_that_no_token_hits_are_not_read(sizes):
    model = sizes("qwen3-30b-a3b")
    line = {
        "prompt_length/mean": 0.0,
        "response_length/mean": 1.0,
        "response_length/max": 1.0,
        "response_length/std": 0.0,
    }
    one, many = (decode_bytes(load_config(BENCH_CONFIG), model, line, count) for count in (1, 1000))
    cache = 2 * 48 * 4 * 128 * 2
    weights = NUM_PARAMETERS["qwen3-30b-a3b"] - 151936 * 2048
    assert many - 1000 * cache == pytest.approx(2 * weights)
    assert one - cache == pytest.approx(2 * (weights - model.experts * 120 / 128))


def test_bandwidth_of_common_gpus():
    assert peak_bandwidth("NVIDIA H200") == 4.8e12
    assert peak_bandwidth("NVIDIA H100 80GB HBM3") == 3.35e12
    assert [peak_bandwidth(f"NVIDIA {name}") for name in ("H100 PCIe", "H100 NVL", "GH200 480GB")] == [None] * 3
    assert peak_bandwidth("another one") is peak_bandwidth(None) is None
