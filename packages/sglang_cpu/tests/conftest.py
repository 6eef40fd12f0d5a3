"""One real engine for the session: float32, deterministic, with a custom weight loader."""

import os
import sys
import types

import pytest
import torch
import transformers
from tidemill_testing import tiny_model

LOADER = '''
def load_reversed(model, named_tensors):
    """A loader of the user's own: it receives the tensors in the scheduler and may do with them what it likes."""
    model.load_weights(reversed(named_tensors))
'''


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", num_hidden_layers=3)


@pytest.fixture(scope="session")
def engine(checkpoint, tmp_path_factory):
    """A stock `sglang.Engine`, small enough that prompts are prefilled in pieces and batches run in waves."""
    folder = tmp_path_factory.mktemp("loader")
    (folder / "tidemill_test_loader.py").write_text(LOADER)
    sys.path.insert(0, str(folder))  # multiprocessing hands it on to the scheduler
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import sglang

    engine = sglang.Engine(
        model_path=str(checkpoint),
        skip_tokenizer_init=True,
        enable_deterministic_inference=True,
        chunked_prefill_size=32,
        max_total_tokens=1024,
        custom_weight_loader=["tidemill_test_loader.load_reversed"],
        log_level="warning",
    )
    yield engine
    engine.shutdown()
    sys.path.remove(str(folder))


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
    """Log-probabilities [len(response)] that `model` gives the response's tokens."""
    tokens = torch.tensor([[*prompt, *response]])
    logits = model(tokens).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).view(-1)


def _engine_log_probs(output):
    return torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])


@pytest.fixture(scope="session")
def reference():
    """What the engine is compared with: transformers, one token at a time, without a cache."""
    return types.SimpleNamespace(load=_load, greedy=_greedy, log_probs=_log_probs, engine_log_probs=_engine_log_probs)
