"""Reference results of transformers, which the real engine is compared with."""

import types

import pytest
import torch
import transformers


def _load(path, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


@torch.no_grad()
def _greedy(model, prompt, num_tokens):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def _log_probs(model, prompt, response, temperature=1.0):
    """Log-probabilities [len(response)] of the tokens of the response under `model`."""
    tokens = torch.tensor([[*prompt, *response]])
    logits = model(tokens).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).view(-1)


def _engine_log_probs(output):
    return torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])


@pytest.fixture(scope="session")
def reference():
    """Reference functions: transformers, one token at a time, without a cache."""
    return types.SimpleNamespace(load=_load, greedy=_greedy, log_probs=_log_probs, engine_log_probs=_engine_log_probs)
