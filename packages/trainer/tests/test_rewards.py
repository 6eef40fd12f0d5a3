import asyncio

import pytest
from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.rewards import exact_match, load_reward, register_reward


def test_exact_match_ignores_surrounding_whitespace():
    assert [asyncio.run(exact_match("d", text, 12, None)) for text in (" 12\n", "13")] == [1.0, 0.0]


def test_function_loads_by_registered_name_and_by_module_path():
    assert load_reward("tidemill_trainer.rewards:exact_match") is load_reward("exact_match") is exact_match
    with pytest.raises(ValueError, match="the reward function 'exact_match' is registered already"):
        register_reward("exact_match")(lambda *_: 0.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exactmatch", r"expected a registered reward function \(exact_match\), .*, got 'exactmatch'; or \"endpoint\""),
        ("none.py:f", r"the file /.*/none\.py does not exist"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("tidemill_trainer.rewards:nothing", "has no function 'nothing'"),
    ],
)
def test_missing_function_is_rejected(name, message):
    with pytest.raises(ConfigError, match=f"config key reward.function: .*{message}"):
        load_reward(name)


def test_function_with_other_parameters_is_rejected(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def two(solution, truth): return 0.0\n"
        "def others(solution_str, ground_truth, strict=False, pause=None): return 0.0\n"
        "def any(**arguments): return 0.0\n"
        "class Four:\n"
        "    def __call__(self, solution_str, ground_truth, data_source, extra_info=None): return 0.0\n"
        "four = Four()\n"
    )
    for name, parameters in (("two", r"\(solution, truth\)"), ("others", r"\(solution_str, .*\)")):
        with pytest.raises(
            ConfigError, match=rf"mine\.py:{name} must accept the keyword arguments data_source, .*{parameters}$"
        ):
            load_reward(f"{tmp_path / 'mine.py'}:{name}")
    for name in ("any", "four"):
        assert callable(load_reward(f"{tmp_path / 'mine.py'}:{name}"))


def test_function_loads_from_file_and_import_errors_are_reported(tmp_path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=r"cannot import '.*bad\.py' .*SyntaxError"):
        load_reward(f"{tmp_path / 'bad.py'}:f")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"cannot import '.*leaves\.py' .*SystemExit: 3"):
        load_reward(f"{tmp_path / 'leaves.py'}:f")
    (tmp_path / "good.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass A:\n    x: int\ndef f(**_): return A(1).x\n"
    )
    assert load_reward(f"{tmp_path / 'good.py'}:f")() == 1
