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


class NotingPool:
    """An engine that notes the sampling parameters of its requests."""

    def __init__(self):
        self.sampling = []

    async def generate(self, token_ids, sampling, *, session_id):
        self.sampling.append(sampling)
        return Generation(token_ids=[5], log_probs=[-0.5], finish_reason="length", versions=[("0", 1)])

    def forget(self, session_id): ...


@pytest.fixture
def sampling_of(assets, tmp_path, monkeypatch):
    """`sampling_of("key=value", ..., greedy=False)`: the sampling parameters of the requests of an episode."""
    monkeypatch.setattr(episode_worker, "join_run", lambda *_: None)
    monkeypatch.setattr(episode_worker.gc, "freeze", lambda: None)
    (tmp_path / "env.py").write_text(EPISODE)

    def run(*overrides, greedy):
        config = load_config(DEMO_CONFIG, [*assets, f"episode.function={tmp_path}/env.py:episode", *overrides])

        async def solve():
            worker = episode_worker.EpisodeWorker(0, [0], "")
            worker._pool = NotingPool()
            await worker.load(config)
            tasks = [EpisodeTask(number=0, problem=Problem(prompt="1+1=", id="1-0"), seed=3)]
            parts = [part async for part in worker.run(tasks, greedy=greedy)]
            assert [each.outcome.status for part in parts for each in part.summaries] == ["ok"]
            return worker._pool.sampling

        return asyncio.run(solve())

    return run


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
