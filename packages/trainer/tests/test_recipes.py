"""The presets of algorithms in `recipes/`."""

from pathlib import Path

import pytest
from tidemill_trainer.algorithm import Algorithm
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config_file import load_config
from tidemill_trainer.roles import required_roles

RECIPES = Path(__file__).parents[3] / "recipes"
PRESETS = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "ppo", "dapo", "gspo", "cispo", "opd", "distill_topk"]


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_short_and_valid(name):
    file = RECIPES / f"{name}.toml"
    assert len(file.read_text().splitlines()) <= 15
    overrides = ["algorithm.overlong_buffer_len=2"] if name == "dapo" else []  # replies of the demo have 6 tokens
    config = load_config(DEMO_CONFIG, [str(file), *overrides])
    Algorithm.of(config)
    roles = {"ppo": ["critic"], "grpo": ["reference"], "reinforce_plus_plus": ["reference"]}
    roles |= {"opd": ["teacher"], "distill_topk": ["teacher"]}
    assert required_roles(config) == roles.get(name, [])
