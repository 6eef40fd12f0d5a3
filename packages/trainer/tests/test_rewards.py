import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_trainer.config import RewardConfig
from tidemill_trainer.rewards import RewardError, RewardScorer, load_reward, register_reward

_FILE = """
def by_length(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str) / 10, "acc": solution_str == ground_truth}

def fails_on_7(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "7":
        raise KeyError("seven")
    return {"8": float("nan"), "9": 1e39}.get(solution_str, 1)

def exits(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "7":
        raise SystemExit(0)
    return 1.0

def interrupts(data_source, solution_str, ground_truth, extra_info):
    raise KeyboardInterrupt
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(_FILE)
    return path


def _batch(tokenizer, texts, truths):
    rows = [torch.tensor([*tokenizer.encode(text), tokenizer.eos_token_id]) for text in texts]
    objects = {"data_source": ["d"] * len(texts), "ground_truth": truths, "extra_info": [None] * len(texts)}
    return DataProto.from_dict(
        {"responses": ragged.ragged_from_list(rows)}, {k: np.array(v, dtype=object) for k, v in objects.items()}
    )


def _scorer(function, tokenizer, on_error="zero"):
    return RewardScorer(RewardConfig(function=function, on_error=on_error), load_reward(function), tokenizer)


def test_exact_match_ignores_the_end_token(tokenizer):
    scores = _scorer("exact_match", tokenizer)(_batch(tokenizer, ["12", "13"], ["12", "12"]))
    assert scores.score.tolist() == [1.0, 0.0]
    assert scores.acc.tolist() == [1.0, 0.0]
    assert scores.texts == ["12", "13"]


def test_dict_result_sets_score_and_accuracy(file, tokenizer):
    scorer = _scorer(f"{file}:by_length", tokenizer)
    scores = scorer(_batch(tokenizer, ["12", "123"], ["12", "12"]))
    assert scores.score.tolist() == pytest.approx([0.2, 0.3])
    assert scores.acc.tolist() == [1.0, 0.0]


def test_error_is_counted_and_other_samples_are_scored(file, tokenizer):
    scorer = _scorer(f"{file}:fails_on_7", tokenizer)
    scores = scorer(_batch(tokenizer, ["6", "7", "8", "9"], ["0"] * 4))
    assert scores.score.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert len(scores.errors) == 3
    assert "failed for response '7' (ground truth '0') at my_rewards.py:7: KeyError: 'seven'" in scores.errors[0]
    assert "the function must return finite numbers within float32, got nan" in scores.errors[1]
    assert "the function must return finite numbers within float32, got 1e+39" in scores.errors[2]


def test_function_that_fails_on_the_whole_first_batch_raises(file, tokenizer):
    scorer = _scorer(f"{file}:fails_on_7", tokenizer)
    with pytest.raises(RewardError, match=r"failed for all 2 responses of the first batch; first error: .*'seven'"):
        scorer(_batch(tokenizer, ["7", "7"], ["0"] * 2))
    assert len(scorer(_batch(tokenizer, ["6", "7"], ["0"] * 2)).errors) == 1
    assert len(scorer(_batch(tokenizer, ["7", "7"], ["0"] * 2)).errors) == 2  # a bad batch later on is only counted


def test_system_exit_counts_as_error_and_keyboard_interrupt_propagates(file, tokenizer):
    scores = _scorer(f"{file}:exits", tokenizer)(_batch(tokenizer, ["6", "7", "8"], ["0"] * 3))
    assert scores.score.tolist() == [1.0, 0.0, 1.0]
    assert "at my_rewards.py:12: SystemExit: 0" in scores.errors[0]
    with pytest.raises(KeyboardInterrupt):
        _scorer(f"{file}:interrupts", tokenizer)(_batch(tokenizer, ["6"], ["0"]))


def test_deadline_in_another_thread_raises_instead_of_counting_errors(tokenizer):
    batch = _batch(tokenizer, ["6", "7"], ["6", "7"])
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match=r"a deadline of 60 s requires the main thread"):
            pool.submit(_scorer("exact_match", tokenizer), batch).result()
        config = RewardConfig(function="exact_match", timeout_s=float("inf"))
        unlimited = RewardScorer(config, load_reward("exact_match"), tokenizer)
        assert pool.submit(unlimited, batch).result().score.tolist() == [1.0, 1.0]


def test_error_raises_if_on_error_is_stop(file, tokenizer):
    scorer = _scorer(f"{file}:fails_on_7", tokenizer, on_error="stop")
    with pytest.raises(RewardError, match=r"KeyError: 'seven'; set reward\.on_error=\"zero\" to count such"):
        scorer(_batch(tokenizer, ["7"], ["0"]))


def test_function_loads_by_registered_name_and_by_module_path(tokenizer):
    assert load_reward("tidemill_trainer.rewards:exact_match") is load_reward("exact_match")
    with pytest.raises(ValueError, match="'exact_match' is registered already"):
        register_reward("exact_match")(lambda *_: 0.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exactmatch", "expected one of exact_match, or \"pkg.mod:attr\" or .*, got 'exactmatch'"),
        ("none.py:f", r"the file /.*/none\.py does not exist"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("tidemill_trainer.rewards:nothing", "has no function 'nothing'"),
    ],
)
def test_missing_function_is_rejected(name, message):
    with pytest.raises(RewardError, match=message):
        load_reward(name)


def test_function_loads_from_file_and_import_errors_are_reported(tmp_path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(RewardError, match=r"cannot import '.*bad\.py:f': SyntaxError"):
        load_reward(f"{tmp_path / 'bad.py'}:f")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(RewardError, match=r"cannot import '.*leaves\.py:f': SystemExit: 3"):
        load_reward(f"{tmp_path / 'leaves.py'}:f")
    (tmp_path / "good.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass A:\n    x: int\ndef f(*_): return A(1).x\n"
    )
    assert load_reward(f"{tmp_path / 'good.py'}:f")() == 1


_SLOW = """
import re, time

def sleeps(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "7":
        time.sleep(1000)
    return 1.0

def loops(data_source, solution_str, ground_truth, extra_info):
    while solution_str == "7":
        try:
            time.sleep(0.01)
        except Exception:
            pass
    return 1.0

def backtracks(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "7":
        re.match(r"(a+)+$", "a" * 60 + "b")
    return 1.0

def swallows(data_source, solution_str, ground_truth, extra_info):
    for _ in range(3 if solution_str == "7" else 0):
        try:
            time.sleep(1000)
        except:
            pass
    return 1.0
"""


_PLACE = {"sleeps": "slow", "loops": "slow", "backtracks": r"\w+", "swallows": "rewards"}


@pytest.mark.parametrize("function", ["sleeps", "loops", "backtracks", "swallows"])
def test_function_that_exceeds_the_timeout_counts_as_error(function, tmp_path, tokenizer):
    (tmp_path / "slow.py").write_text(_SLOW)
    config = RewardConfig(function=f"{tmp_path / 'slow.py'}:{function}", timeout_s=0.2)
    num_threads = threading.active_count()
    scores = RewardScorer(config, load_reward(config.function), tokenizer)(
        _batch(tokenizer, ["6", "7", "8"], ["0", "0", "0"])
    )

    assert scores.score.tolist() == [1.0, 0.0, 1.0]
    assert re.search(
        rf"failed for response '7' .* at {_PLACE[function]}\.py:\d+: DeadlineError: no result within 0\.2 s",
        scores.errors[0],
    )
    assert threading.active_count() == num_threads
