"""The recipes for real models, with the sizes of their `config.json` and without their weights."""

import json
import re
from pathlib import Path

import pytest
from tidemill_trainer.bench.shapes import SHAPES
from tidemill_trainer.cli import main

RECIPES = Path(__file__).parents[4] / "recipes"
README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize(
    ("recipe", "shape", "num_gpus"),
    [
        ("gsm8k_qwen2.5_0.5b", "qwen2.5-0.5b", 1),
        ("dapo_math_qwen3_4b", "qwen3-4b", 8),
        ("dapo_math_qwen3_8b", "qwen3-8b", 8),
        ("dapo_math_qwen3_30b_a3b", "qwen3-30b-a3b", 16),
    ],
)
def test_recipe_fits_and_states_its_memory(recipe, shape, num_gpus, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
    file = RECIPES / f"{recipe}.toml"
    command = ["plan", str(file), f"model.path={tmp_path}", "--device-memory", "139GiB", "--num-gpus", str(num_gpus)]
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["problems"] == []
    training = plan["devices"][0]["phases"]["forward/backward"]["parts"]
    needed = sum(part["bytes"] for part in training if part["role"] == "policy") / 2**30
    assert f"the training needs {needed:.1f} GiB at most" in file.read_text()
    rows = [line for line in README.read_text().splitlines() if f"({'../' * 2}recipes/{recipe}.toml)" in line]
    assert f" {needed:.1f} GiB " in rows[0]
    assert main(command) == 0
    share = re.search(r"; KV pool and weights (\d+)% of a GPU\n", capsys.readouterr().out)
    assert share is not None
    assert re.search(rf"GiB at most, and the engines? {share[1]} % of the memory", file.read_text())
