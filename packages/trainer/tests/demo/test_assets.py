import json
from pathlib import Path

from tidemill_trainer.demo import write_assets


def test_assets_are_a_tiny_model_and_512_validation_problems(assets):
    from transformers import AutoModelForCausalLM

    folder = Path(assets[0].removeprefix("model.path=")).parent
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert 5e5 < sum(p.numel() for p in model.parameters()) < 2e6
    assert json.loads((folder / "model" / "config.json").read_text())["eos_token_id"] == 1
    assert len((folder / "val.jsonl").read_text().splitlines()) == 512


def test_tools_task_writes_demonstrations_for_training_and_256_validation_problems(tmp_path):
    write_assets(tmp_path, seed=1, task="tools")
    train, val = ([json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()] for name in ("train", "val"))
    assert (len(train), len(val)) == (4096, 256)
    assert all(row["response"][-1]["role"] == "assistant" for row in train)
    assert not any("response" in row for row in val)
    assert {row["data_source"] for row in val} == {"shop-1", "shop-2", "shop-3"}


def test_sft_task_writes_conversations_that_end_with_the_total(tmp_path):
    write_assets(tmp_path, seed=1, task="sft")
    train, val = ([json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()] for name in ("train", "val"))
    assert (len(train), len(val)) == (2048, 256)
    assert all(row["messages"][-1]["content"] == row["messages"][-2]["content"] for row in train)
