"""A conversation with two tool calls, as `rollouts.jsonl` has it."""

import json
import re

import pytest

SYSTEM = "You may call tools. Answer with a number."
ARGUMENTS = ('{"expression": "17*23"}', '{"expression": "391+4"}')


def conversation(question, *, tool_name="calculator", results=("391", "395"), answer="The answer is 395."):
    """Return the messages, and for each turn the text of its context and of its reply in Qwen's chat template."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    contexts, replies = [], []
    context = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    for number, (arguments, result) in enumerate(zip(ARGUMENTS, results, strict=True)):
        contexts.append(context)
        call = json.dumps({"name": tool_name, "arguments": json.loads(arguments)}, ensure_ascii=False)
        replies.append(f"I calculate.\n<tool_call>\n{call}\n</tool_call><|im_end|>")
        function = {"name": tool_name, "arguments": arguments}
        calls = [{"id": f"call_{number}", "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "I calculate.", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": result})
        context = f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    messages.append({"role": "assistant", "content": answer})
    return messages, [*contexts, context], [*replies, f"{answer}<|im_end|>"]


def line(step, sample, question="What is 17*23+4?", *, versions=None, **changes):
    """Return a line of `rollouts.jsonl`.

    Args:
        versions: weight versions of the sampled tokens as runs; one version if None.
        changes: arguments of `conversation`.
    """
    messages, contexts, replies = conversation(question, **changes)
    tokens, turns, mask = [], [], []
    for context, reply in zip(contexts, replies, strict=True):
        parts = [re.findall(r"<\|?\w+\|?>|\s?\w{1,5}|\s|.", text, re.DOTALL) for text in (context, reply)]
        turns.append([len(part) for part in parts])
        tokens += [token for part in parts for token in part]
        mask += [0] * turns[-1][0] + [1] * turns[-1][1]
    num_prompt = turns[0][0]
    mask = mask[num_prompt:]
    rollout = [-((7 * index) % 13) / 10 * trained for index, trained in enumerate(mask)]
    row = {
        "branch": "main",
        "finish_reason": "stop",
        "versions": versions or [[str(step - 1), sum(mask)]],
        "turns": turns,
        "texts": [],
        "token_ids": [sum(map(ord, token)) % 5000 for token in tokens],
        "tokens": tokens,
        "response_mask": mask,
        "rollout_log_probs": rollout,
        "old_log_probs": [value - (index % 17 == 0) * 0.3 for index, value in enumerate(rollout)],
        "advantages": [0.75 * trained for trained in mask],
        "messages": messages,
    }
    return {
        "step": step,
        "prompt": contexts[0],
        "response": "".join(tokens[num_prompt:]),
        "ground_truth": "395",
        "score": 1.0,
        "acc": 1.0,
        "episode": f"{step}-17/{sample}",
        "data_source": "sums with tools",
        "status": "ok",
        "reason": "",
        "seconds": 0.25 + sample,
        "metrics": {"num_turns": 3.0, "num_sampled_tokens": float(sum(mask)), "num_tool_errors": 0.0},
        "rows": [row],
    }


def failed(step, sample, status, reason, data_source="sums with tools"):
    """Return the line of an episode without a trained row."""
    return line(step, sample) | {
        "score": None,
        "acc": None,
        "prompt": "",
        "response": "",
        "status": status,
        "reason": reason,
        "data_source": data_source,
        "metrics": {"num_turns": 1.0, "num_sampled_tokens": 9.0},
        "rows": [],
    }


@pytest.fixture
def run(tmp_path):
    from tidemill_trainer.run_dir import RunDir

    run = RunDir(tmp_path)
    run.config.write_text("[model]\n")
    return run


@pytest.fixture
def sample_line():
    return line


@pytest.fixture
def failed_line():
    return failed
