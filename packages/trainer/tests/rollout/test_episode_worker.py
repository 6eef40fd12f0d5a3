"""Episodes of a worker, in this process, with an engine that notes the requests."""

import asyncio

import pytest
from tidemill_rollout import Generation, Problem
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config_file import load_config
from tidemill_trainer.demo import chat
from tidemill_trainer.demo.model import piece_tokenizer, write_model
from tidemill_trainer.rollout import episode_worker
from tidemill_trainer.rollout.episode_task import EpisodeTask

EPISODE = """
async def episode(problem, session):
    await session.generate(text=problem.prompt)
    await session.generate(text=problem.prompt, temperature=1.0)
    return 1.0
"""


LONG_EPISODE = """
import asyncio

async def episode(problem, session):
    await session.generate(text=problem.prompt)
    await asyncio.sleep(0.5)
    return 1.0
"""


class NotingPool:
    """An engine that notes the sampling parameters of its requests."""

    def __init__(self):
        self.sampling = []

    async def generate(self, token_ids, sampling, *, session_id):
        self.sampling.append(sampling)
        return Generation(token_ids=[5], log_probs=[-0.5], finish_reason="length", versions=[("0", 1)])

    def forget(self, session_id): ...


@pytest.fixture
def solve(assets, tmp_path, monkeypatch):
    """`solve(code, "key=value", ...)`: run an episode; return its status and the parameters of its requests."""
    monkeypatch.setattr(episode_worker, "join_run", lambda *_: None)
    monkeypatch.setattr(episode_worker.gc, "freeze", lambda: None)

    def run(code, *overrides, greedy=False, clock_runs=True):
        (tmp_path / "env.py").write_text(code)
        config = load_config(DEMO_CONFIG, [*assets, f"episode.function={tmp_path}/env.py:episode", *overrides])

        async def in_worker():
            worker = episode_worker.EpisodeWorker(0, [0], "")
            worker._pool = NotingPool()
            await worker.load(config)
            await worker.set_clock(runs=clock_runs)
            tasks = [EpisodeTask(number=0, problem=Problem(prompt="1+1=", id="1-0"), seed=3)]
            [summary] = [each async for part in worker.run(tasks, greedy=greedy) for each in part.summaries]
            return summary.outcome.status, worker._pool.sampling

        return asyncio.run(in_worker())

    return run


@pytest.fixture
def sampling_of(solve):
    """`sampling_of("key=value", ..., greedy=False)`: the sampling parameters of the requests of an episode."""

    def run(*overrides, greedy):
        status, sampling = solve(EPISODE, *overrides, greedy=greedy)
        assert status == "ok"
        return sampling

    return run


@pytest.mark.parametrize(("clock_runs", "status"), [(True, "truncated"), (False, "ok")])
def test_time_limit_of_an_episode_does_not_count_the_time_in_which_the_clock_stands_still(solve, clock_runs, status):
    assert solve(LONG_EPISODE, "episode.timeout_s=0.1", clock_runs=clock_runs)[0] == status


@pytest.mark.parametrize(("greedy", "temperature"), [(True, 0.0), (False, 1.0)])
def test_validation_is_greedy_although_an_agent_sends_the_temperature_of_the_training(sampling_of, greedy, temperature):
    assert [each.temperature for each in sampling_of(greedy=greedy)] == [temperature] * 2


@pytest.mark.parametrize("greedy", [True, False])
def test_replies_end_at_the_end_tokens_of_tokenizer_and_chat_template(sampling_of, tmp_path, greedy):
    special = (*chat.STARTS, chat.END)
    tokenizer = piece_tokenizer("1+=", eos_token="<eos>", special_tokens=special, chat_template=chat.TEMPLATE)
    write_model(tmp_path / "model", tokenizer, max_length=128, seed=0)
    ends = sorted(tokenizer.convert_tokens_to_ids(["<eos>", chat.END]))
    for sampling in sampling_of(f"model.path={tmp_path}/model", greedy=greedy):
        assert sampling.extra == {"stop_token_ids": ends}


def test_replies_of_a_model_without_chat_template_end_at_the_end_token_of_the_tokenizer(sampling_of, tokenizer):
    for sampling in sampling_of(greedy=False):
        assert sampling.extra == {"stop_token_ids": [tokenizer.eos_token_id]}


def test_sequences_leave_the_positions_of_the_model_free_that_sglang_cannot_use(sampling_of, tokenizer, tmp_path):
    write_model(tmp_path / "model", tokenizer, max_length=128, seed=0)
    sizes = ["data.max_prompt_length=8", "rollout.response_length=120"]
    first, _ = sampling_of(f"model.path={tmp_path}/model", *sizes, greedy=False)
    assert first.max_tokens == 128 - 6 - len(tokenizer.encode("1+1="))
