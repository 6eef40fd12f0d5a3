"""Properties of the divergence over the k most probable tokens and the rest."""

import math

import pytest
import torch
from tidemill_algorithms import POLICY_LOSSES
from tidemill_algorithms.losses.forward_kl_topk import forward_kl_topk
from tidemill_dataproto import DataProto, ragged


def divergence(topk, teacher):
    """Return the terms [N] and the gradient [N, k] of the policy's log-probabilities."""
    topk = topk.clone().requires_grad_()
    lengths = [len(topk)]
    columns = {
        "topk_log_probs": ragged.ragged(topk, lengths),
        "teacher_topk_log_probs": ragged.ragged(teacher, lengths),
    }
    terms, metrics = POLICY_LOSSES["forward_kl_topk"](torch.zeros(len(topk)), DataProto.from_dict(columns))
    (gradient,) = torch.autograd.grad(terms.sum(), topk)
    return terms.detach(), gradient, metrics


def test_minimum_over_all_distributions_is_the_teacher_on_the_outcomes():
    """Gradient descent on the logits of 8 ids reaches the teacher's probabilities of 3 ids and the rest."""
    torch.manual_seed(0)
    teacher = torch.randn(5, 8, dtype=torch.float64).mul(2).log_softmax(-1).topk(3)
    logits = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    for _ in range(400):
        log_probs = logits.log_softmax(-1).gather(-1, teacher.indices)
        terms, gradient, _ = divergence(log_probs.detach(), teacher.values)
        assert (terms > -1e-12).all()
        (step,) = torch.autograd.grad(log_probs, logits, gradient)
        logits.data -= 2.0 * step
    assert terms.max() < 1e-6
    torch.testing.assert_close(log_probs.exp(), teacher.values.exp(), rtol=1e-2, atol=1e-3)


def test_certain_teacher_and_policy_have_finite_terms_and_gradients():
    certain = torch.tensor([[0.0, -30.0]])
    even = torch.tensor([[0.5, 0.25]]).log()
    elsewhere = torch.tensor([[-80.0, -90.0]])
    cases = [(topk, teacher) for topk in (certain, even, elsewhere) for teacher in (certain, even, elsewhere)]
    terms, gradient, _ = divergence(*(torch.cat(column) for column in zip(*cases, strict=True)))
    assert torch.isfinite(terms).all()
    assert torch.isfinite(gradient).all()
    same = torch.tensor([topk is teacher for topk, teacher in cases])
    assert terms[same].abs().max() < 1e-6
    assert terms[~same].min() > 0.1


def test_whole_vocabulary_has_no_rest():
    generator = torch.Generator().manual_seed(0)
    topk, teacher = torch.randn(2, 50, 8, generator=generator).log_softmax(-1)
    terms, _, metrics = divergence(topk, teacher)
    torch.testing.assert_close(terms, (teacher.exp() * (teacher - topk)).sum(-1), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(metrics["actor/topk_mass"], torch.ones(50))


def test_masses_are_those_of_the_k_ids():
    topk, teacher = torch.tensor([[0.1, 0.2]]).log(), torch.tensor([[0.5, 0.4]]).log()
    metrics = divergence(topk, teacher)[2]
    assert metrics["actor/topk_mass"].item() == pytest.approx(0.3)
    assert metrics["actor/teacher_topk_mass"].item() == pytest.approx(0.9)


def test_token_that_the_teacher_excludes_adds_nothing():
    columns = {
        "topk_log_probs": torch.tensor([[0.5, 0.25]]).log(),
        "teacher_topk_log_probs": torch.tensor([[0.5, 0.0]]).log(),
    }
    batch = DataProto.from_dict({name: ragged.ragged(values, [1]) for name, values in columns.items()})
    terms, _ = forward_kl_topk(torch.zeros(1), batch)
    assert terms.item() == pytest.approx(0.5 * math.log(0.5 / 0.25), rel=1e-5)
