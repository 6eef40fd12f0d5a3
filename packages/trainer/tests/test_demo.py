import json

import pytest
from tidemill_trainer.demo import write_assets
from tidemill_trainer.demo.model import character_tokenizer
from tidemill_trainer.demo.task import CHARACTERS, addition_row, addition_rows


def test_answers_are_sums_from_right_to_left():
    row = addition_row(47, 85, 2)
    assert (row["prompt"], row["ground_truth"]) == ("47+85=", "231")
    for row in addition_rows(2, 50, 10, seed=1)[0]:
        a, b = row["prompt"].rstrip("=").split("+")
        assert int(row["ground_truth"][::-1]) == int(a) + int(b)


def test_held_out_problems_are_not_trained_on():
    train, val = addition_rows(2, 9000, 1000, seed=0)
    prompts = [row["prompt"] for row in [*train, *val]]
    assert len(set(prompts)) == 10000
    with pytest.raises(ValueError, match="must be <= 10000, the number of problems with 2 digits, got 10001"):
        addition_rows(2, 10001, 0, seed=0)


def test_the_tokenizer_round_trips_through_disk(tmp_path):
    from transformers import AutoTokenizer

    character_tokenizer(CHARACTERS).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("12+34=", add_special_tokens=False)
    assert len(ids) == 6
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12+34="


def test_the_model_is_tiny_and_loads(tmp_path):
    from transformers import AutoModelForCausalLM

    write_assets(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert 5e5 < sum(p.numel() for p in model.parameters()) < 2e6
    assert json.loads((tmp_path / "model" / "config.json").read_text())["eos_token_id"] == 1
    assert len((tmp_path / "val.jsonl").read_text().splitlines()) == 512
