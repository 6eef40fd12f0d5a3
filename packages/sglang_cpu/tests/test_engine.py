"""The real engine, compared with transformers."""

import time

import psutil
import pytest
import torch

pytestmark = pytest.mark.sglang

PROMPTS = [[5, 6, 7], [9] * 20, [3], list(range(3, 80)), list(range(100, 30, -1))]


def sampling(**fields):
    return {"ignore_eos": True, "max_new_tokens": 12, **fields}


@pytest.fixture(scope="module")
def model(checkpoint, reference):
    return reference.load(checkpoint)


def test_greedy_tokens_and_log_probs_equal_transformers(engine, model, reference):
    outputs = engine.generate(input_ids=PROMPTS, sampling_params=sampling(temperature=0), return_logprob=True)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output["output_ids"] == reference.greedy(model, prompt, 12)
        expected = reference.log_probs(model, prompt, output["output_ids"])
        torch.testing.assert_close(reference.engine_log_probs(output), expected, atol=1e-4, rtol=0)


def test_sampled_log_probs_include_the_temperature(engine, model, reference):
    params = [sampling(temperature=0.7, sampling_seed=i) for i in range(len(PROMPTS))]
    outputs = engine.generate(input_ids=PROMPTS, sampling_params=params, return_logprob=True)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = reference.log_probs(model, prompt, output["output_ids"], temperature=0.7)
        torch.testing.assert_close(reference.engine_log_probs(output), expected, atol=1e-4, rtol=0)


def test_prompt_log_probs_equal_transformers(engine, model, reference):
    prompt = PROMPTS[3]
    output = engine.generate(
        input_ids=prompt, sampling_params=sampling(temperature=0), return_logprob=True, logprob_start_len=0
    )
    got = torch.tensor([entry[0] for entry in output["meta_info"]["input_token_logprobs"][1:]])
    expected = reference.log_probs(model, prompt[:1], prompt[1:])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_repetition_penalty_applies_to_generated_tokens(engine, model):
    """SGLang penalizes a token once, however often it was generated, and not for its occurrence in the prompt."""
    penalties = [1.0, 1.3, 2.0, 1.3, 0.7]
    params = [sampling(temperature=0, repetition_penalty=penalty) for penalty in penalties]
    outputs = engine.generate(input_ids=PROMPTS, sampling_params=params)
    for prompt, penalty, output in zip(PROMPTS, penalties, outputs, strict=True):
        expected = []
        for _ in range(12):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *expected]])).logits[0, -1]
            for token in set(expected):
                logits[token] *= penalty if logits[token] < 0 else 1 / penalty
            expected.append(int(logits.argmax()))
        assert output["output_ids"] == expected


def sample(engine, prompts, seeds, **fields):
    params = [sampling(temperature=1.0, sampling_seed=seed, **fields) for seed in seeds]
    outputs = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    return [(out["output_ids"], [entry[0] for entry in out["meta_info"]["output_token_logprobs"]]) for out in outputs]


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.8, "top_k": 20}, {"min_p": 0.1}])
def test_seeded_sampling_is_independent_of_other_requests(engine, fields):
    prompts, seeds = PROMPTS * 8, list(range(40))
    batch_outputs = sample(engine, prompts, seeds, **fields)
    assert sample(engine, prompts, seeds, **fields) == batch_outputs  # the prompts are in the prefix cache
    engine.flush_cache()
    order = list(range(39, -1, -3))
    backwards = sample(engine, [prompts[i] for i in order], [seeds[i] for i in order], **fields)
    assert backwards == [batch_outputs[i] for i in order]
    for i in (0, 7, 33, 39):
        engine.flush_cache()
        assert sample(engine, [prompts[i]], [seeds[i]], **fields) == [batch_outputs[i]]


def test_other_seeds_give_other_tokens(engine):
    outputs = sample(engine, [PROMPTS[0]] * 16, range(16))
    assert len({tuple(tokens) for tokens, _ in outputs}) > 8
    assert outputs != sample(engine, [PROMPTS[0]] * 16, range(100, 116))


def test_idle_engine_uses_little_cpu_time(engine):
    engine.generate(input_ids=[5], sampling_params=sampling())
    processes = psutil.Process().children(recursive=True)
    (scheduler,) = [process for process in processes if "scheduler" in " ".join(process.cmdline())]
    time.sleep(0.5)
    before = scheduler.cpu_times()
    time.sleep(1.5)
    after = scheduler.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.3
