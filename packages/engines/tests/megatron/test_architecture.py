"""Architectures read from a `config.json`."""

import json
from pathlib import Path
from typing import Any

import pytest
from tidemill_engines.megatron.architecture import Architecture
from tidemill_testing import tiny_model
from transformers import AutoConfig

LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}


def read_config(tmp_path: Path, family: str = "qwen3", **fields: Any) -> dict[str, Any]:
    return json.loads((tiny_model(tmp_path, family) / "config.json").read_text()) | fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "gpt_oss"},
            "does not support model_type 'gpt_oss'; it supports llama, qwen2, qwen3, qwen3_moe",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": None, "rope_scaling": LONGROPE}, "rope type 'longrope'"),
        ({"partial_rotary_factor": 0.5}, r"a partial rotary embedding \(partial_rotary_factor\)"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ({"attention_dropout": 0.1}, "attention dropout"),
        ({"attention_bias": True}, "a bias in o_proj"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        (
            {"hidden_size": "wide"},
            "(?s)config.json is not valid for model_type 'qwen3': .*'hidden_size' expected int, got str",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "'llama3': .*high_freq_factor"),
    ],
)
def test_unsupported_architecture_is_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        Architecture.from_config(read_config(tmp_path, **fields))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
def test_missing_fields_have_the_defaults_of_transformers(tmp_path, family):
    whole = read_config(tmp_path, family)
    rest = {name: value for name, value in whole.items() if name not in ("rope_parameters", "rms_norm_eps")}
    expected = Architecture.from_config(whole | {"rms_norm_eps": 1e-6})
    assert Architecture.from_config(rest) == expected
    assert Architecture.from_config(rest | {"rope_theta": 5e5}) != expected
    wide = Architecture.from_config({name: value for name, value in rest.items() if name != "hidden_size"})
    assert wide.hidden_size == type(AutoConfig.from_pretrained(tmp_path))().hidden_size
