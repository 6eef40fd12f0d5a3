"""The data and the reward of the recipes for math problems."""

import importlib.util
from pathlib import Path

import pytest
from pyarrow import Table, parquet
from tidemill_trainer.config import DataConfig
from tidemill_trainer.data import load_prompts
from tidemill_trainer.demo.chat import chat_tokenizer
from tidemill_trainer.rewards import load_reward

FILE = Path(__file__).parents[3] / "recipes/math_problems.py"


@pytest.fixture
def module():
    spec = importlib.util.spec_from_file_location("math_problems", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(file):
    config = DataConfig(max_prompt_length=256)
    problems, _ = load_prompts([str(file)], chat_tokenizer([]), config, needs_ground_truth=True)
    return problems


def test_gsm8k_is_converted(module, tmp_path):
    (tmp_path / "main").mkdir()
    for split, answer in (("train", "3 + 2 = 5\n#### 1,005"), ("test", "#### -2")):
        rows = Table.from_pylist([{"question": f"How many? ({split})", "answer": answer}])
        parquet.write_table(rows, tmp_path / "main" / f"{split}-00000-of-00001.parquet")
    module.main("gsm8k", str(tmp_path), str(tmp_path / "out"))
    train, val = load(tmp_path / "out/train.jsonl"), load(tmp_path / "out/val.jsonl")
    assert train.non_tensor_batch["ground_truth"].tolist() == ["1005"]
    assert val.non_tensor_batch["ground_truth"].tolist() == ["-2"]
    assert train.non_tensor_batch["prompt"][0][0]["content"].startswith("How many? (train) Let's think")


def test_copies_of_a_problem_of_dapo_math_are_removed(module, tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": f"Problem {number}"}], "reward_model": {"ground_truth": str(number)}}
        for number in range(600)
    ]
    parquet.write_table(Table.from_pylist([*rows, *rows]), tmp_path / "all.parquet")
    module.main("dapo-math", str(tmp_path), str(tmp_path / "out"))
    train, val = load(tmp_path / "out/train.jsonl"), load(tmp_path / "out/val.jsonl")
    assert (len(train), len(val)) == (88, 512)
    assert train.non_tensor_batch["ground_truth"][87] == "87"
    assert val.non_tensor_batch["ground_truth"][0] == "88"


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("3 + 2 = 5\n#### 5", "5", 1.0),
        ("#### 6 or rather #### $1,005", "1005", 1.0),
        ("Answer: 12", "12", 1.0),
        ("Answer: \\boxed{-7}", "-7", 1.0),
        ("So it is \\boxed{34}. **Answer:** 34", "34", 1.0),
        ("#### 5.0", "5", 1.0),
        ("the answer is 5", "5", 0.0),
        ("#### 4", "5", 0.0),
        ("#### five", "5", 0.0),
        ("", "5", 0.0),
        ("Answer: \\(34\\)", "34", 1.0),
        ("#### \\$18", "18", 1.0),
        ("#### 50%", "50", 1.0),
        ("Answer: 2\\sqrt{3}", "2", 0.0),
        ("Answer: 1/2", "1", 0.0),
        ("#### 10\nAnswer: 10^{5}", "10", 0.0),
        ("\\boxed{3x+1}", "3", 0.0),
        ("Answer: 12:30", "12", 0.0),
        ("Answer: 9007199254740993", "9007199254740992", 0.0),
    ],
)
def test_last_marked_number_is_the_answer(text, truth, expected):
    assert (
        load_reward(f"{FILE}:score")(data_source="source", solution_str=text, ground_truth=truth, extra_info=None)
        == expected
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ["x", " / 2"])
def test_many_digits_before_a_letter_take_linear_time(module, end):
    assert module.score("source", f"#### {'1' * 20_000}{end}", "1", None) == 0.0


def test_missing_files_are_named(module, tmp_path):
    with pytest.raises(SystemExit, match=r"expected files train-\*\.parquet in .*main, found none"):
        module.main("gsm8k", str(tmp_path), str(tmp_path / "out"))
