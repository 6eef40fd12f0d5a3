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
    with pytest.raises(
        ConfigError,
        match=r"config key episode\.function: expected a registered episode .*'nothing'; or \"single_turn\"",
    ):
        create_episode(_config(episode={"function": "nothing"}))
    with pytest.raises(ConfigError, match=r"config key reward\.function: "):
        create_episode(_config(reward={"function": "nothing"}))


def test_episode_must_accept_a_problem_and_a_session(tmp_path):
    (tmp_path / "env.py").write_text(
        "import functools\n"
        "async def one(problem): ...\n"
        "async def three(problem, session, tools): ...\n"
        "class Environment:\n    def __call__(self, problem, session): ...\n"
        "environment, bound = Environment(), functools.partial(three, tools=[])\n"
    )
    for name, parameters in (("one", r"\(problem\)"), ("three", r"\(problem, session, tools\)")):
        message = rf"env\.py:{name} must accept the arguments \(problem, session\), got the parameters {parameters}$"
        with pytest.raises(ConfigError, match=rf"config key episode\.function: .*{message}"):
            create_episode(_config(episode={"function": f"{tmp_path}/env.py:{name}"}))
    for name in ("environment", "bound"):
        assert callable(create_episode(_config(episode={"function": f"{tmp_path}/env.py:{name}"})))


@pytest.mark.parametrize("name", ["tool_loop", "single_turn"])
def test_function_that_returns_an_episode_is_no_episode(name):
    message = rf"episodes:{name} returns an episode, .* `episode = {name}\(\.\.\.\)` in env\.py"
    with pytest.raises(ConfigError, match=rf"config key episode\.function: .*{message}"):
        create_episode(_config(episode={"function": f"tidemill_rollout.episodes:{name}"}))


def test_endpoint_requires_an_address_and_the_episode_single_turn():
    reward = {"function": "endpoint", "url": "http://127.0.0.1:30000"}
    create_episode(_config(reward=reward))
    with pytest.raises(ConfigError, match=r"config key reward\.url: expected an address such as http://.*got 'host:1'"):
        create_episode(_config(reward=reward | {"url": "host:1"}))
    with pytest.raises(ConfigError, match=r'requires episode\.function="single_turn", got "env\.py:play"'):
        _config(reward=reward, episode={"function": "env.py:play"})
