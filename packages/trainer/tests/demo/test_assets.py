import json
from pathlib import Path


def test_assets_are_a_tiny_model_and_512_validation_problems(assets):
    from transformers import AutoModelForCausalLM

    folder = Path(assets[0].removeprefix("model.path=")).parent
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert 5e5 < sum(p.numel() for p in model.parameters()) < 2e6
    assert json.loads((folder / "model" / "config.json").read_text())["eos_token_id"] == 1
    assert len((folder / "val.jsonl").read_text().splitlines()) == 512
