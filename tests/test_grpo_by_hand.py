"""The recipe without the trainer, as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.sglang, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(600)]

RECIPE = Path(__file__).parents[1] / "recipes" / "grpo_by_hand.py"


def test_recipe_learns_in_at_most_120_lines():
    run = subprocess.run([sys.executable, str(RECIPE)], capture_output=True, text=True, timeout=540, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rewards = [float(reward) for reward in re.findall(r"^step +\d+: reward (\S+),", run.stdout, re.MULTILINE)]
    assert len(rewards) == 30
    assert max(rewards[:3]) < 0.6  # random answers earn 0.5
    assert sum(rewards[-5:]) / 5 > 0.75
    assert len(RECIPE.read_text().splitlines()) <= 120
