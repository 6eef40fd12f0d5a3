import pytest
import torch
from loss_cases import Counts, Output, counts_of, loss_and_gradient, make_batch, weigh
from tidemill_algorithms import ActorLoss, AdaptiveKLController, FixedKLController, kl_penalty
from tidemill_dataproto import DataProto, ragged

NAMES = ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["kl", "k1", "kl+", "k1+"], [0.1, -0.5]),
        (["abs", "abs+"], [0.1, 0.5]),
        (["mse", "k2"], [0.005, 0.125]),
        (["low_var_kl", "k3", "low_var_kl+", "k3+"], [0.00483742, 0.14872127]),
    ],
)
def test_known_numbers(names, expected):
    for name in names:
        values = kl_penalty(*torch.tensor([[-1.0, -2.0], [-1.1, -1.5]], dtype=torch.float64), name)
        assert values.tolist() == pytest.approx(expected, abs=1e-8)


def test_plus_keeps_the_value_bitwise_and_takes_the_gradient_of_k2():
    generator = torch.Generator().manual_seed(0)
    log_prob, ref = -3 * torch.rand(2, 50, generator=generator)
    for name in ("kl", "k1", "abs", "low_var_kl", "k3"):
        leaf = log_prob.clone().requires_grad_()
        values = kl_penalty(leaf, ref, f"{name}+")
        assert torch.equal(values, kl_penalty(log_prob, ref, name))
        values.sum().backward()
        torch.testing.assert_close(leaf.grad, log_prob - ref)


def test_extreme_difference_has_a_bounded_k3_without_gradient():
    leaf = torch.tensor([-500.0, 0.0], requires_grad=True)
    values = kl_penalty(leaf, torch.tensor([0.0, -500.0]), "k3")
    assert values.tolist() == [10.0, 10.0]
    values.sum().backward()
    assert leaf.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["full", "k2+", "k4"])
def test_unknown_name_is_an_error(name):
    with pytest.raises(ValueError, match=f"must be one of kl, k1, .*got '{name.replace('+', '.')}'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), name)
    with pytest.raises(ValueError, match="must be one of kl"):
        ActorLoss(kl_loss_type=name)


def expected_gradient(name, logits, log_q):
    """Gradient in the logits of the mean of a KL loss over all tokens of a vocabulary, weighted by pi, and of KLs."""
    leaf = logits.clone().requires_grad_()
    log_p = leaf.log_softmax(-1)
    sampled = log_p.detach().exp()
    mask = ragged.ragged(torch.ones(len(logits)), [1] * len(logits))
    columns = {"loss_weights": sampled, "ref_log_prob": log_q, "advantages": 0 * log_q}
    columns = {column: ragged.like(values, mask) for column, values in columns.items()}
    batch = DataProto.from_dict({"response_mask": mask, **columns})
    loss = ActorLoss(policy_loss="policy_gradient", kl_loss_coef=1.0, kl_loss_type=name)
    value, metrics = loss(Output(log_p), batch, counts_of(batch))
    value.backward()
    return metrics["actor/kl_loss"].item(), leaf.grad


def exact_gradient(logits, log_q, *, reverse):
    leaf = logits.clone().requires_grad_()
    log_p = leaf.log_softmax(-1)
    divergence = log_q.exp() @ (log_q - log_p) if reverse else log_p.exp() @ (log_p - log_q)
    divergence.backward()
    return divergence.item(), leaf.grad


def test_expected_values_and_gradients_are_exact_on_an_enumerable_softmax():
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    log_q = other.log_softmax(-1)
    divergence, forward = exact_gradient(logits, log_q, reverse=False)
    _, backward = exact_gradient(logits, log_q, reverse=True)
    wanted = {"k1": torch.zeros(7).double(), "k2": forward, "k3": backward, "k1+": forward, "k3+": forward}
    for name, gradient in wanted.items():
        value, actual = expected_gradient(name, logits, log_q)
        torch.testing.assert_close(actual, gradient, atol=1e-12, rtol=1e-9)
        if name != "k2":
            assert value == pytest.approx(divergence, rel=1e-12)


def test_bandit_with_kl_penalty_converges_to_the_tilted_reference():
    """The optimum of E[r] - beta KL(pi | ref) is ref * exp(r / beta) / Z."""
    log_q = torch.tensor([0.2, -0.4, 0.1], dtype=torch.float64).log_softmax(-1)
    reward, beta = torch.tensor([1.0, 0.0, 0.3], dtype=torch.float64), 0.5
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    mask = ragged.ragged(torch.ones(3), [1] * 3)
    loss = ActorLoss(policy_loss="policy_gradient", kl_loss_coef=beta, kl_loss_type="k2")
    for _ in range(200):
        log_p = logits.log_softmax(-1)
        columns = {"loss_weights": log_p.detach().exp(), "advantages": reward, "ref_log_prob": log_q}
        columns = {name: ragged.like(column, mask) for name, column in columns.items()}
        batch = DataProto.from_dict({"response_mask": mask, **columns})
        value, _ = loss(Output(log_p), batch, Counts(3.0))
        (gradient,) = torch.autograd.grad(value, logits)
        logits = (logits - 3 * gradient).detach().requires_grad_()
    assert logits.softmax(-1).tolist() == pytest.approx([0.77077, 0.05725, 0.17198], abs=1e-5)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_kl_is_aggregated_like_the_loss(mode):
    batch, log_probs = make_batch(5)
    weighed = weigh(batch, mode)
    loss = ActorLoss(kl_loss_coef=0.1, kl_loss_type="k3")
    value, _, metrics = loss_and_gradient(loss, weighed, log_probs, counts_of(batch))
    plain = kl_penalty(ragged.values(log_probs), ragged.values(batch["ref_log_prob"]), "k3")
    expected = (plain * ragged.values(weighed["loss_weights"])).sum().item()
    assert metrics["actor/kl_loss"] == pytest.approx(expected)
    assert metrics["actor/kl_coef"] == pytest.approx(0.1)
    assert value == pytest.approx(metrics["actor/pg_loss"] + 0.1 * expected)


def test_adaptive_controller_follows_the_error_and_is_restored():
    controller = AdaptiveKLController(kl_coef=0.1, target_kl=1.0, horizon=100)
    for kl, expected in (
        (10.0, 0.1 * 1.1),
        (0.0, 0.1 * 1.1 * 0.9),
        (1.0, 0.1 * 1.1 * 0.9),
        (0.9, 0.1 * 1.1 * 0.9 * 0.95),
    ):
        controller.update(kl, num_samples=50)
        assert controller.kl_coef == pytest.approx(expected)
    restored = AdaptiveKLController(kl_coef=7.0, target_kl=1.0, horizon=100)
    restored.load_state_dict(controller.state_dict())
    assert restored == controller
    with pytest.raises(ValueError, match="target_kl must be > 0, got 0"):
        AdaptiveKLController(kl_coef=0.1, target_kl=0, horizon=1)


def test_fixed_controller_is_constant():
    controller = FixedKLController(kl_coef=0.3)
    controller.update(100.0, num_samples=50)
    assert controller.state_dict() == {"kl_coef": 0.3}


def test_more_samples_than_the_horizon_do_not_change_the_sign_of_the_coefficient():
    controller = AdaptiveKLController(kl_coef=0.1, target_kl=1.0, horizon=10)
    controller.update(0.0, num_samples=512)
    assert controller.kl_coef == pytest.approx(0.08)
