"""Identities of KL estimators and policy gradients, exact on a distribution that can be enumerated.

The distribution is that of one response token, given a prompt, over the vocabulary of a tiny model. An expectation is
a sum over all tokens (or all groups of two), run through the engine as an ordinary batch over ranks and micro-batches.
That two gradients are equal is seen by the gradient norm of their difference.
"""

from itertools import product

import pytest
import torch
from engine_cases import build_engine, shard
from tidemill_dataproto import DataProto, ragged
from tidemill_testing import run_ranks, tiny_model

NUM_TOKENS = 7  # vocabulary size
PROMPT = [3, 1, 4]


def one_token_rows(tokens, **columns):
    """Create a row PROMPT + token for each token, with float64 columns of one element per row."""
    responses = ragged.ragged(torch.tensor(tokens), [1] * len(tokens))
    prompts = ragged.ragged(torch.tensor(PROMPT * len(tokens)), [len(PROMPT)] * len(tokens))
    tensors = {"input_ids": ragged.concat_rows(prompts, responses), "responses": responses}
    tensors["response_mask"] = ragged.like(torch.ones(len(tokens)), responses)
    tensors |= {name: ragged.like(torch.as_tensor(values), responses) for name, values in columns.items()}
    return DataProto.from_dict(tensors)


def loss_of(terms):
    """Sum each of `terms(log_p, columns)` over rows; the first is the loss, all are metrics."""

    def loss(output, micro_batch, normalizer):
        columns = {name: micro_batch[name].values() for name in micro_batch.batch.keys()}  # noqa: SIM118
        sums = {name: term.sum() for name, term in terms(output.log_probs, columns).items()}
        return next(iter(sums.values())), sums

    return loss


def kl_terms(wanted):
    def terms(log_p, columns):
        log_q, p = columns["log_q"], log_p.exp()
        sampled = p.detach()  # probability of this row
        difference = log_p - log_q
        estimators = {
            "k1": sampled * difference,
            "k2": sampled * difference.square() / 2,
            "k3": sampled * ((-difference).exp() - 1 + difference),
        }
        exact = {"KL(p|q)": p * difference, "KL(q|p)": -log_q.exp() * difference}
        losses = {
            "grad k1": estimators["k1"],
            "grad k2 - grad KL(p|q)": estimators["k2"] - exact["KL(p|q)"],
            "grad k3 - grad KL(q|p)": estimators["k3"] - exact["KL(q|p)"],
            "grad k3 - grad KL(p|q)": estimators["k3"] - exact["KL(p|q)"],
            "grad KL(p|q)": exact["KL(p|q)"],
        }
        return {wanted: losses[wanted]} | estimators | exact

    return terms


REWARDS = [1.0, 0.0, 0.3, -2.0, 0.5, 0.1, 1.5]


def policy_gradient_terms(wanted):
    """Groups of two: the loss -E[sum of A_i log p_i] / 2 against that of J = E[r]."""

    def terms(log_p, columns):
        estimated = -columns["drawn"] * columns[wanted] * log_p / 2
        # a row y occurs in 2 * NUM_TOKENS groups, so J is divided by this number
        exact = -columns["reward"] * log_p.exp() / (2 * NUM_TOKENS)
        scale = {"rloo": 1.0, "dr_grpo": 0.5, "exact": 0.0}[wanted]
        return {"objective": estimated - scale * exact if wanted != "exact" else exact}

    return terms


def run_identities(path, reference_path):
    settings = {"max_token_len_per_gpu": 60, "optimizer": {"lr": 0.0}}
    reference = build_engine(reference_path, optimizer=False)
    engine = build_engine(path, **settings)
    every = one_token_rows(range(NUM_TOKENS))
    log_p, log_q = (ragged.values(one.infer_batch(every)["log_probs"]) for one in (engine, reference))
    rows = one_token_rows(range(NUM_TOKENS), log_q=log_q)
    kl = {}
    for wanted in (
        "grad k1",
        "grad k2 - grad KL(p|q)",
        "grad k3 - grad KL(q|p)",
        "grad k3 - grad KL(p|q)",
        "grad KL(p|q)",
    ):
        kl[wanted] = engine.train_batch(shard(engine, rows), loss_of(kl_terms(wanted)))

    groups = list(product(range(NUM_TOKENS), repeat=2))
    reward, p = torch.tensor(REWARDS), log_p.exp()
    pairs = torch.tensor(groups)
    drawn = p[pairs].prod(1, keepdim=True).expand(-1, 2)
    of_pair = reward[pairs]
    columns = {
        "drawn": drawn,
        "reward": of_pair,
        "rloo": of_pair - of_pair.flip(1),
        "dr_grpo": of_pair - of_pair.mean(1, keepdim=True),
        "exact": of_pair,
    }
    grouped = one_token_rows(pairs.flatten().tolist(), **{name: x.flatten() for name, x in columns.items()})
    norms = {
        wanted: engine.train_batch(shard(engine, grouped), loss_of(policy_gradient_terms(wanted)))["grad_norm"]
        for wanted in ("rloo", "dr_grpo", "exact")
    }
    engine.close()
    reference.close()
    return kl, norms, (log_p.double().exp() * (log_p - log_q).double()).sum().item()


@pytest.mark.parametrize("world_size", [2])
def test_kl_estimators_and_rloo_have_the_expected_gradients(tmp_path, world_size):
    path, reference = (tiny_model(tmp_path / str(seed), "qwen3", seed=seed, vocab_size=NUM_TOKENS) for seed in range(2))
    for kl, norms, exact in run_ranks(run_identities, world_size, path, reference):
        for metrics in kl.values():
            assert exact > 0.1
            for name in ("k1", "k3", "KL(p|q)"):
                assert metrics[name] == pytest.approx(exact, rel=1e-5)
            assert metrics["k2"] != pytest.approx(exact, rel=1e-2)
        scale = kl["grad KL(p|q)"]["grad_norm"]
        assert scale > 0.1
        for name in ("grad k1", "grad k2 - grad KL(p|q)", "grad k3 - grad KL(q|p)"):
            assert kl[name]["grad_norm"] < 1e-5 * scale, name
        assert kl["grad k3 - grad KL(p|q)"]["grad_norm"] > 0.1 * scale  # the two gradients differ
        assert norms["exact"] > 0.1
        assert norms["rloo"] < 1e-5 * norms["exact"]
        assert norms["dr_grpo"] < 1e-5 * norms["exact"]
