"""Chunked log-probabilities and entropy against full logits, softmax and autograd."""

from functools import partial

import pytest
import torch
from engine_cases import build_engine, make_batch, policy_like_loss
from head_cases import CASES, DEVICES, Allocations, M, V, gradients, make, plain
from tidemill_dataproto import ragged
from tidemill_engines.head.log_probs import Head, head_log_probs
from tidemill_testing import tiny_model


@pytest.mark.parametrize("chunk_columns", [1, 5, V, 1000])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
@pytest.mark.parametrize("device", DEVICES)
def test_values_and_gradients_equal_the_plain_computation(device, dtype, tolerance, case, chunk_columns):
    settings = dict(CASES[case])
    temperature = settings.pop("temperature", 1.0)
    hidden, head, labels = make(dtype, device=device, **settings)
    chunk_bytes = chunk_columns * M * dtype.itemsize
    actual = head_log_probs(hidden, head, labels, temperature=temperature, entropy=True, chunk_bytes=chunk_bytes)[:2]
    expected = plain(hidden, head, labels, temperature=temperature)
    inputs = [hidden, head.weight, *([] if head.bias is None else [head.bias])]
    pairs = [*zip(actual, expected, strict=True)]
    pairs += [*zip(gradients(actual, inputs), gradients(expected, inputs), strict=True)]
    without_entropy = head_log_probs(hidden, head, labels, temperature=temperature, chunk_bytes=chunk_bytes)
    assert without_entropy[1] is None
    pairs += [(without_entropy[0], expected[0])]
    pairs += [*zip(gradients(without_entropy[:1], inputs), gradients(expected[:1], inputs), strict=True)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_gradients_equal_finite_differences():
    hidden, head, labels = make(torch.float64, num_tokens=4, bias=True, softcap=3.0)

    def run(hidden, weight, bias):
        return head_log_probs(
            hidden, Head(weight=weight, bias=bias, softcap=3.0), labels, temperature=0.7, entropy=True, chunk_bytes=1
        )[:2]

    assert torch.autograd.gradcheck(run, (hidden, head.weight, head.bias))


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_head_computes_logits_and_sums_in_float32(device):
    hidden, head, labels = make(torch.bfloat16, num_tokens=2048, device=device)
    inputs = [hidden, head.weight]
    exact = plain(hidden.double(), Head(weight=head.weight.double()), labels)
    wanted = gradients(exact, inputs)
    rounded = plain(hidden, head, labels)
    for chunk_columns in (V, 1):
        actual = head_log_probs(hidden, head, labels, entropy=True, chunk_bytes=chunk_columns * 2048 * 4)[:2]
        for ours, theirs, with_rounded_logits in zip(actual, exact, rounded, strict=True):
            assert ours.dtype == torch.float32
            error = (ours - theirs).abs().max()
            assert error < 1e-5 < (with_rounded_logits - theirs).abs().max()
        for ours, theirs in zip(gradients(actual, inputs), wanted, strict=True):
            assert ours.dtype == torch.bfloat16
            error = ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
            assert error < 0.01, (chunk_columns, error)


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_and_frozen_weights(device):
    hidden, head, labels = make(torch.float32, device=device)
    for nothing in gradients(head_log_probs(hidden[:0], head, labels[:0], entropy=True)[:2], [hidden, head.weight]):
        assert not nothing.any()
    frozen = Head(weight=head.weight.detach())
    actual, *_ = head_log_probs(hidden, frozen, labels)
    (grad,) = gradients([actual], [hidden])
    torch.testing.assert_close(grad, gradients([plain(hidden, head, labels)[0]], [hidden])[0])
    only_head, *_ = head_log_probs(hidden.detach(), head, labels)
    (grad,) = gradients([only_head], [head.weight])
    torch.testing.assert_close(grad, gradients([plain(hidden, head, labels)[0]], [head.weight])[0])
    with torch.no_grad():
        assert not head_log_probs(hidden, head, labels)[0].requires_grad


def test_precision_for_nearly_certain_tokens():
    """log p = -exp(-40) is far below the resolution of logits of the size 1000."""
    weight = torch.tensor([[1000.0], [960.0]])
    log_probs, entropy, *_ = head_log_probs(torch.ones(1, 1), Head(weight=weight), torch.tensor([1]), entropy=True)
    assert log_probs.item() == -40
    assert entropy is not None
    assert entropy.item() == pytest.approx(40 * torch.tensor(-40.0).exp().item(), rel=1e-3)


def allocations(compute, num_tokens, vocab_size=4096):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 4, generator=generator).requires_grad_()
    weight = torch.randn(vocab_size, 4, generator=generator).requires_grad_()
    labels = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    with Allocations() as seen:
        log_probs, entropy, *_ = compute(hidden, Head(weight=weight), labels)
        (log_probs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return seen


def test_memory_is_independent_of_vocabulary_size():
    chunk_bytes = 16 * 4096 * 4

    def fused(hidden, head, labels):
        return head_log_probs(hidden, head, labels, entropy=True, chunk_bytes=chunk_bytes)

    few, many = allocations(fused, 256), allocations(fused, 2048)
    reference = allocations(plain, 2048)
    all_logits_bytes = 2048 * 4096 * 4
    assert reference.largest_bytes == all_logits_bytes  # the recorder works
    assert reference.peak_bytes > 3 * all_logits_bytes
    assert few.largest_bytes == many.largest_bytes == chunk_bytes
    # memory linear in the tokens: outputs, and gradients of the hidden states
    assert many.peak_bytes - few.peak_bytes <= (2048 - 256) * 4 * 16
    assert many.peak_bytes < reference.peak_bytes / 50


def test_engine_does_not_materialize_logits(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    vocab_size, chunk_tokens = 3000, 16
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=vocab_size, tie_word_embeddings=True)
    batch = make_batch(60, longest=12)
    num_predicted = len(ragged.values(batch["responses"]))
    all_logits_bytes = num_predicted * vocab_size * 4
    in_chunks = partial(head_log_probs, chunk_bytes=chunk_tokens * vocab_size * 4)
    monkeypatch.setattr("tidemill_engines.fsdp2.language_model.head_log_probs", in_chunks)
    engine = build_engine(path)
    with Allocations() as seen:
        engine.infer_batch(batch, entropy=True)
        engine.train_batch(batch, policy_like_loss, calculate_entropy=True)
    engine.close()
    weight_bytes = vocab_size * 64 * 4
    assert seen.largest_bytes < 2 * weight_bytes < all_logits_bytes / 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_memory_and_values_on_cuda():
    num_tokens, hidden_size, vocab_size = 8192, 1024, 151936
    torch.manual_seed(0)
    device = torch.device("cuda")
    hidden = torch.randn(num_tokens, hidden_size, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab_size, hidden_size, device=device) / 32).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(0, vocab_size, (num_tokens,), device=device)

    def run(compute):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        log_probs, entropy, *_ = compute(hidden, Head(weight=weight), labels)
        grads = torch.autograd.grad((log_probs - 0.1 * entropy).sum(), [hidden, weight])
        peak = torch.cuda.max_memory_allocated() - before
        return peak, [x.detach().float().cpu() for x in (log_probs, entropy, *grads)]

    plain_peak, expected = run(plain)
    peak, actual = run(partial(head_log_probs, entropy=True))
    assert peak * 8 <= plain_peak, (peak, plain_peak)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ((ours - theirs).norm() / theirs.norm()).item() < 0.01
