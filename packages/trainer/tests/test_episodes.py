import pytest
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, parse_config
from tidemill_trainer.episodes import create_episode


def _config(**sections):
    return parse_config(Config, {"model": {"path": "m"}, **sections})


def test_episode_loads_from_a_file(tmp_path):
    (tmp_path / "env.py").write_text("async def episode(problem, session):\n    return 1.0\n")
    assert create_episode(_config(episode={"function": f"{tmp_path}/env.py:episode"})).__name__ == "episode"


def test_missing_episode_and_missing_reward_function_name_their_keys():
    with pytest.raises(ConfigError, match=r"config key episode\.function: expected a registered episode .*'nothing'"):
        create_episode(_config(episode={"function": "nothing"}))
    with pytest.raises(ConfigError, match=r"config key reward\.function: "):
        create_episode(_config(reward={"function": "nothing"}))
