"""Sessions: prompts, limits, sampling parameters, branches."""

import asyncio

import numpy as np
import pytest
import torch
from episode_cases import run
from template_cases import user
from tidemill_rollout import (
    Generation,
    LimitError,
    Policy,
    SamplingParams,
    SessionConfig,
    SessionEndedError,
    SGLangEngine,
)

USER = {"role": "user", "content": "hello"}
AGAIN = {"role": "user", "content": "what is the weather today"}


def test_string_in_place_of_an_engine_is_refused(tokenizer):
    with pytest.raises(TypeError, match=r"engine must be an object such as SGLangServer\(url\), got 'http://host:1'"):
        Policy("http://host:1", tokenizer)
    with pytest.raises(TypeError, match=r"engine must be an sglang\.Engine, got 'model'; .* SGLangServer\(url\)"):
        SGLangEngine("model")


def test_prompt_of_text_does_not_count_the_vocabulary(scripted, tokenizer, monkeypatch):
    """It takes tens of milliseconds for 150,000 tokens, so it would hold up the other episodes of the process."""
    policy, counted = scripted("the answer<|im_end|>"), []
    monkeypatch.setattr(type(tokenizer), "__len__", counted.append)
    asyncio.run(policy.session().generate(text="hello"))
    assert not counted


def test_second_reply_continues_the_recorded_tokens(scripted, tokenizer):
    policy = scripted("the answer<|im_end|>", "forty-two<|im_end|>")
    session = policy.session(seed=7)

    async def run():
        first = await session.generate([USER])
        await session.generate([USER, first.message, AGAIN])

    asyncio.run(run())
    (row,) = session.trajectories()
    conversation = [
        USER,
        {"role": "assistant", "content": "the answer"},
        AGAIN,
        {"role": "assistant", "content": "forty-two"},
    ]
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert tokenizer.decode(row.token_ids) == text.rstrip("\n")
    assert policy.engine.requests[1][0] == list(row.token_ids[: len(policy.engine.requests[1][0])])
    sampled = [token for token, mask in zip(row.response_ids, row.response_mask, strict=True) if mask]
    assert tokenizer.decode(sampled) == "the answer<|im_end|>forty-two<|im_end|>"
    assert session.metrics()["num_trained_tokens"] == session.metrics()["num_sampled_tokens"]


def test_seeds_differ_by_request_and_depend_on_the_session_seed_alone(scripted):
    def seeds(seed):
        policy = scripted("x<|im_end|>")
        session = policy.session(seed=seed)

        async def run():
            for _ in range(3):
                await session.generate(text="hello")

        asyncio.run(run())
        return [sampling.seed for _, sampling in policy.engine.requests]

    assert seeds(7) == seeds(7)
    assert seeds(7)[0] == 7
    assert len({*seeds(7), *seeds(8)}) == 6


def test_one_seed_for_all_sessions_is_refused(scripted):
    with pytest.raises(ValueError, match=r"seed=42 .*; pass the seed to session\(\)"):
        SessionConfig(sampling=SamplingParams(seed=42))
    with pytest.raises(ValueError, match=r"pass the seed to session\(\)"):
        scripted("x<|im_end|>").session(sampling=SamplingParams(seed=0))


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_session_seed_that_a_request_cannot_have_is_refused(scripted, seed):
    with pytest.raises(ValueError, match=rf"the seed of a session must be >= 0 and < 2\*\*63, got {seed}"):
        scripted("x<|im_end|>").session(seed=seed)


@pytest.mark.parametrize("convert", [np.array, torch.tensor, tuple])
def test_prompt_of_an_array_or_a_tensor_is_recorded_as_integers(scripted, convert):
    policy = scripted("x<|im_end|>")
    session = policy.session()
    asyncio.run(session.generate(token_ids=convert([5, 6, 7])))
    (row,) = session.trajectories()
    assert list(row.token_ids[:3]) == policy.engine.requests[0][0] == [5, 6, 7]
    assert {type(token) for token in [*row.token_ids, *policy.engine.requests[0][0]]} == {int}


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 5}, {"frequency_penalty": 0.5}, {"logit_bias": {"1": 2}}],
)
def test_sampling_that_training_cannot_account_for_is_refused_in_training_only(scripted, sampling):
    policy = scripted("x<|im_end|>")
    with pytest.raises(ValueError, match=f"cannot account for {next(iter(sampling))}="):
        asyncio.run(policy.session().generate(text="hello", **sampling))
    asyncio.run(policy.session(is_training=False).generate(text="hello", **sampling))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"text": "hello", "seed": 2**63}, "seed must be >= -2"),
        ({"text": "hello", "top_k": 2**31}, "top_k must be < 2"),
        ({"token_ids": [5, -1]}, r"token_ids must be >= 0 and < \d+, the size of the vocabulary, got -1"),
        ({"token_ids": [5, 10**6]}, r"token_ids must be >= 0 and < \d+, the size of the vocabulary, got 1000000"),
        ({"text": "hello", "stop": ""}, r"stop must contain strings that are not empty, got \[''\]"),
        ({"text": "hello", "stop": ["a", ""]}, r"stop must contain strings that are not empty, got \['a', ''\]"),
    ],
)
def test_number_that_would_crash_the_engine_is_refused_and_the_session_continues(scripted, request_, message):
    policy = scripted("x<|im_end|>", config=SessionConfig(is_training=False))
    session = policy.session(seed=7)

    async def run():
        with pytest.raises(ValueError, match=message):
            await session.generate(**request_)
        await session.generate(text="hello")

    asyncio.run(run())
    assert [sampling.seed for _, sampling in policy.engine.requests] == [7]


def test_values_equal_to_the_sampling_of_the_run_are_accepted_in_training(scripted):
    policy = scripted("x<|im_end|>", config=SessionConfig(sampling=SamplingParams(temperature=0.7)))
    asyncio.run(policy.session().generate(text="hello", temperature=0.7, top_p=1.0, stop="\n"))
    assert policy.engine.requests[0][1].stop == ("\n",)


def test_reply_is_limited_to_the_context_length(scripted, tokenizer):
    policy = scripted("x<|im_end|>", config=SessionConfig(context_length=20))
    ids = tokenizer.encode("hello world")
    asyncio.run(policy.session().generate(token_ids=ids))
    assert policy.engine.requests[0][1].max_tokens == 20 - len(ids)
    with pytest.raises(LimitError, match="no reply fits"):
        asyncio.run(policy.session().generate(token_ids=[5] * 20))


def test_number_of_turns_is_limited(scripted):
    session = scripted("x<|im_end|>", config=SessionConfig(max_turns=2)).session()

    async def run():
        for _ in range(3):
            await session.generate(text="hello")

    with pytest.raises(LimitError, match="limit of 2 turns"):
        asyncio.run(run())


def test_ended_session_is_refused(scripted):
    session = scripted("x<|im_end|>").session()

    async def run():
        await session.end()
        await session.generate(text="hello")

    with pytest.raises(SessionEndedError, match="has ended"):
        asyncio.run(run())


def test_end_does_not_wait_for_an_engine_that_ignores_its_cancellation(tokenizer, monkeypatch):
    monkeypatch.setattr("tidemill_rollout.session.CANCEL_GRACE_S", 0.05)
    is_started, is_stopped = asyncio.Event(), asyncio.Event()

    class IgnoringEngine:
        num_cancelled = 0

        async def generate(self, token_ids, sampling, *, session_id):
            is_started.set()
            while not is_stopped.is_set():
                try:
                    await is_stopped.wait()
                except asyncio.CancelledError:
                    self.num_cancelled += 1
            return Generation(token_ids=[5, 6, 7], log_probs=[-1.0] * 3, finish_reason="length", versions=[("0", 3)])

    async def run():
        engine = IgnoringEngine()
        session = Policy(engine, tokenizer).session()
        request = asyncio.create_task(session.generate(text="hello"))
        await is_started.wait()
        await session.end()
        assert (engine.num_cancelled, request.done()) == (1, False)
        is_stopped.set()
        with pytest.raises(SessionEndedError, match="ended before the engine replied"):
            await request
        assert session.trajectories() == []
        assert session.metrics()["num_sampled_tokens"] == 0
        assert session.metrics()["num_unused_tokens"] == 3

    asyncio.run(run())


def test_branch_has_its_own_history_and_is_trained_as_requested(scripted):
    session = scripted("x<|im_end|>").session()

    async def run():
        await session.generate([USER])
        await session.branch("critic", is_trained=False).generate([USER])
        await session.branch().generate([USER])
        session.branch("branch-4")
        session.branch()  # its name is free

    asyncio.run(run())
    assert [row.branch for row in session.trajectories()] == ["main", "branch-2"]
    assert session.recorder.forks == {}
    assert session.metrics()["num_sampled_tokens"] == 6
    assert session.metrics()["num_trained_tokens"] == 4


def test_tokens_of_a_reply_that_the_caller_extends_do_not_change_the_record(scripted):
    async def episode(problem, session):
        ids = (await session.generate(token_ids=[10, 11])).token_ids
        ids += [20, 21]  # an observation
        await session.generate(token_ids=[10, 11, *ids])
        return 1.0

    result = run(scripted("yes<|im_end|>"), episode)
    (row,) = result.trajectories
    assert row.turns == [(2, 4), (2, 4)]
    assert list(row.response_mask) == [1] * 4 + [0] * 2 + [1] * 4
    assert len(row.rollout_log_probs) == 10
    assert result.metrics["num_unused_tokens"] == 0


def test_engine_that_extends_its_prompt_does_not_change_the_record(tokenizer):
    class Engine:
        async def generate(self, token_ids, sampling, *, session_id):
            token_ids.append(40)
            return Generation(token_ids=[40], log_probs=[-1.0], finish_reason="length", versions=[("0", 1)])

    session = Policy(Engine(), tokenizer).session()
    asyncio.run(session.generate([user("a")]))
    (row,) = session.trajectories()
    assert list(row.prompt_ids) == tokenizer.apply_chat_template([user("a")], add_generation_prompt=True)["input_ids"]


def test_messages_of_a_row_that_the_caller_extends_do_not_change_the_record(scripted):
    policy = scripted("yes<|im_end|>")
    session = policy.session()
    asyncio.run(session.generate([user("a")]))
    messages = session.trajectories()[0].messages
    messages.append(user("b"))
    asyncio.run(session.generate(messages))
    assert "b<|im_end|>" in policy.tokenizer.decode(policy.engine.requests[-1][0])
