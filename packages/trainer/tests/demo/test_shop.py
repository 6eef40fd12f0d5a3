"""The shop: customers, demonstrations, and conversations with the real tool loop."""

import asyncio
import json
from collections import Counter

import pytest
from tidemill_rollout import ChatTemplate, Generation, Policy, Problem, demonstration
from tidemill_trainer.demo.chat import chat_tokenizer
from tidemill_trainer.demo.shop import PIECES, checkout, shop_rows

PROBLEM = Problem(
    prompt=[{"role": "user", "content": "fig, tea"}], ground_truth="47", extra_info={"fig": 12, "tea": 35}
)


class Replies:
    """An engine that replies with given texts."""

    def __init__(self, tokenizer, texts):
        self._tokenizer = tokenizer
        self._texts = iter(texts)

    async def generate(self, token_ids, sampling, *, session_id):
        ids = self._tokenizer.encode(next(self._texts), add_special_tokens=False)
        return Generation(token_ids=ids, log_probs=[-0.5] * len(ids), finish_reason="stop", versions=[("0", len(ids))])


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(PIECES)


@pytest.fixture
def serve(tokenizer):
    """`serve(*replies)`: result of a checkout, and its text."""

    def run(*texts, problem=PROBLEM):
        policy = Policy(Replies(tokenizer, texts), tokenizer)
        result = asyncio.run(policy.run(checkout, problem))
        (row,) = result.trajectories
        return result, tokenizer.decode(row.token_ids)

    return run


def scan(item):
    return f'<tool_call>\n{{"name": "scan", "arguments": {{"item": "{item}"}}}}\n</tool_call><|im_end|>'


def test_register_returns_the_total_so_far_and_the_right_total_is_rewarded(serve):
    result, text = serve(scan("fig"), scan("tea"), "47<|im_end|>")
    assert result.outcome.reward == 1.0
    assert text == (
        "<|im_start|>system\nscan<|im_end|><|im_start|>user\nfig, tea<|im_end|><|im_start|>assistant\n"
        + f"{scan('fig')}<|im_start|>tool\n12<|im_end|><|im_start|>assistant\n"
        + f"{scan('tea')}<|im_start|>tool\n47<|im_end|><|im_start|>assistant\n47<|im_end|>"
    )
    metrics = result.metrics
    assert metrics["num_turns"] == 3
    assert metrics["num_trained_tokens"] == metrics["num_sampled_tokens"]
    assert result.outcome.metrics == {"num_tool_calls": 2.0, "num_tool_errors": 0.0}


def test_forgotten_item_is_not_rewarded(serve):
    assert serve(scan("fig"), "12<|im_end|>")[0].outcome.reward == 0.0


def test_invented_item_and_invented_tool_are_returned_to_the_model_as_errors(serve):
    other = scan("fig").replace("scan", "pay")
    result, text = serve(scan("pear"), other, scan("fig"), scan("tea"), "47<|im_end|>")
    assert "<|im_start|>tool\nError: scan failed: ValueError: there is no pear<|im_end|>" in text
    assert "<|im_start|>tool\nError: there is no tool 'pay'; the tools are: scan<|im_end|>" in text
    assert result.outcome.reward == 1.0
    assert result.outcome.metrics == {"num_tool_calls": 4.0, "num_tool_errors": 2.0}


def test_hasty_demonstrations_forget_the_last_item_and_all_others_are_right(serve, tokenizer):
    train, _ = shop_rows(400, 1, seed=0, hasty_share=0.75)
    hasty = Counter()
    for row in train:
        count = len(row["extra_info"])
        calls = [message["tool_calls"][0] for message in row["response"] if "tool_calls" in message]
        scanned = [json.loads(call["function"]["arguments"])["item"] for call in calls]
        is_right = row["response"][-1]["content"] == row["ground_truth"]
        assert scanned == list(row["extra_info"])[: count if is_right else -1]
        hasty[count, is_right] += 1
    assert hasty[1, False] == 0
    for count in (2, 3):
        assert 0.6 < hasty[count, False] / (hasty[count, False] + hasty[count, True]) < 0.9


def test_demonstrations_have_the_tokens_of_an_episode_with_the_same_replies(serve, tokenizer):
    template = ChatTemplate(tokenizer)
    for row in shop_rows(20, 1, seed=1, hasty_share=0.5)[0]:
        demo = demonstration(template, row["prompt"], row["response"], row["tools"])
        assert tokenizer.unk_token_id not in demo.token_ids
        replies, start = [], demo.num_prompt_tokens
        for number, (num_context, num_sampled) in enumerate(demo.turns):
            start += num_context if number > 0 else 0
            replies.append(tokenizer.decode(demo.token_ids[start : start + num_sampled]))
            start += num_sampled
        problem = Problem(prompt=row["prompt"], ground_truth=row["ground_truth"], extra_info=row["extra_info"])
        result, _ = serve(*replies, problem=problem)
        (recorded,) = result.trajectories
        assert list(recorded.token_ids) == list(demo.token_ids)
        assert list(recorded.response_mask) == list(demo.response_mask)


def test_customers_depend_on_the_seed_alone():
    assert shop_rows(5, 5, seed=1, hasty_share=0.5) == shop_rows(5, 5, seed=1, hasty_share=0.5)
    assert shop_rows(5, 5, seed=1, hasty_share=0.5) != shop_rows(5, 5, seed=2, hasty_share=0.5)
