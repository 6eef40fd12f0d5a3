"""The kernels of the head against softmax and autograd in float64, on a GPU or in Triton's interpreter.

`test_kernels_in_triton_interpreter` runs this file again in a process that interprets kernels on the CPU.
"""

import os

import pytest
import torch
from tidemill_engines.head.logits import LogitRule, LogitSlice
from tidemill_engines.head.softmax import SoftmaxParts
from tidemill_testing.interpreter import run_in_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
on_device = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device")

RULES = {
    "plain": LogitRule(),
    "temperature": LogitRule(temperature=0.6),
    "scale": LogitRule(scale=0.25, temperature=1.3),
    "softcap": LogitRule(scale=2.0, softcap=3.0, temperature=0.7),
}


def exact(logits, bias, labels, rule):
    """Compute log p(label) and entropy [M] in float64."""
    x = rule.scale * (logits.double() + (0.0 if bias is None else bias.double()))
    if rule.softcap is not None:
        x = rule.softcap * torch.tanh(x / rule.softcap)
    log_p = (x / rule.temperature).log_softmax(-1)
    return log_p.gather(-1, labels[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def slices(logits, bias, starts):
    ends = [*starts[1:], logits.shape[1]]
    return [  # copies, as gradients overwrite logits
        LogitSlice(logits[:, start:end].clone(), None if bias is None else bias[start:end], start)
        for start, end in zip(starts, ends, strict=True)
    ]


def by_kernels(logits, bias, labels, rule, starts, grads, dtype=torch.float32):
    """Compute log p(label), entropy and the gradient [M, V] of the logits, for one or both outputs."""
    from tidemill_engines.head.kernels import add_slice, slice_gradients

    parts = SoftmaxParts(len(labels), torch.float32, DEVICE)
    for piece in slices(logits, bias, starts):
        add_slice(parts.values, piece, labels, rule)
    statistics = parts.statistics()
    entropy = grads[1] if len(grads) > 1 else None
    grad = [
        slice_gradients(piece, labels, statistics, grads[0], grads[0], entropy, rule, dtype)
        for piece in slices(logits, bias, starts)
    ]
    return parts.log_probs(), statistics[2], torch.cat(grad, 1)


def draw(num_tokens, vocab_size, *, spread=3.0, bias=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_tokens, vocab_size, generator=generator) * spread).to(DEVICE)
    labels = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    labels[0] = 0
    labels[-1] = vocab_size - 1
    grads = torch.randn(2, num_tokens, generator=generator).to(DEVICE)
    return logits, torch.randn(vocab_size, generator=generator).to(DEVICE) if bias else None, labels.to(DEVICE), grads


def compare(logits, bias, labels, rule, starts, grads, *, tolerance):
    actual = by_kernels(logits, bias, labels, rule, starts, grads)
    x = logits.double().requires_grad_()
    expected = exact(x, bias, labels, rule)
    (grad,) = torch.autograd.grad(expected[: len(grads)], x, [g.double() for g in grads])
    for ours, theirs in zip(actual, (*expected, grad), strict=True):
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@on_device
class TestKernels:
    @pytest.mark.parametrize("with_entropy", [True, False])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("rule", RULES)
    def test_values_and_gradients_equal_float64(self, rule, bias, with_entropy):
        logits, bias, labels, grads = draw(5, 1003, bias=bias)
        wanted = grads if with_entropy else grads[:1]
        compare(logits, bias, labels, RULES[rule], [0], wanted, tolerance=1e-5)

    @pytest.mark.parametrize(
        ("num_tokens", "vocab_size", "starts"),
        [
            (1, 1, [0]),
            (1, 17, [0]),
            (3, 128, [0, 1, 127]),
            (2, 4096, [0]),
            (2, 4097, [0]),
            (2, 9001, [0, 5000]),
            (7, 300, [0, 100, 200]),
        ],
    )
    def test_sizes_that_are_no_multiples_of_a_block(self, num_tokens, vocab_size, starts):
        logits, bias, labels, grads = draw(num_tokens, vocab_size, bias=True)
        compare(logits, bias, labels, RULES["temperature"], starts, grads, tolerance=1e-5)

    @pytest.mark.parametrize("starts", [[0], [0, 10, 40]])
    def test_large_logits_equal_float64(self, starts):
        logits, _, labels, grads = draw(6, 50)
        logits[0, 0], logits[1, 3], logits[2] = 1e4, -1e4, 1e4
        logits[3, :25], logits[4, 25:] = -1e4, -1e4
        logits[5] = torch.linspace(-1e4, 1e4, 50)
        compare(logits, None, labels, LogitRule(), starts, grads, tolerance=1e-5)

    def test_precision_for_nearly_certain_tokens(self):
        logits = torch.tensor([[1000.0, 960.0]], device=DEVICE)
        log_probs, entropy, _ = by_kernels(
            logits, None, torch.tensor([1], device=DEVICE), LogitRule(), [0, 1], torch.ones(2, 1, device=DEVICE)
        )
        assert log_probs.item() == -40
        assert entropy.item() == pytest.approx(40 * torch.tensor(-40.0).exp().item(), rel=1e-3)

    def test_the_order_of_slices_does_not_matter(self):
        from tidemill_engines.head.kernels import add_slice

        logits, bias, labels, _ = draw(4, 700, bias=True)
        pieces = slices(logits, bias, [0, 200, 650])
        results = []
        for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
            parts = SoftmaxParts(4, torch.float32, DEVICE)
            for i in order:
                add_slice(parts.values, pieces[i], labels, RULES["softcap"])
            results.append(torch.cat([parts.log_probs(), parts.statistics()[2]]))
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-6, atol=1e-6)

    def test_bfloat16_gradients_are_those_of_float32_rounded_once(self):
        logits, _, labels, grads = draw(5, 400)
        args = (logits, None, labels, RULES["temperature"], [0, 128], grads)
        wide, narrow = by_kernels(*args)[2], by_kernels(*args, dtype=torch.bfloat16)[2]
        assert narrow.dtype == torch.bfloat16
        # the interpreter truncates where torch and a GPU round
        torch.testing.assert_close(narrow.float(), wide, rtol=2**-7 if INTERPRETED else 2**-8, atol=0.0)

    def test_gradients_of_float32_are_written_over_the_logits(self):
        from tidemill_engines.head.kernels import slice_gradients

        logits, _, labels, grads = draw(2, 30)
        piece = LogitSlice(logits, None, 0)
        statistics = torch.zeros(3, 2, device=DEVICE)
        grad = slice_gradients(piece, labels, statistics, grads[0], *grads, LogitRule(), torch.float32)
        assert grad.data_ptr() == logits.data_ptr()


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_kernels_compile_without_gpu(bias, softcap):
    """The interpreter accepts code that the compiler rejects."""
    triton = pytest.importorskip("triton")
    from tidemill_engines.head import kernels as head_kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {
        "*fp32": ("logits", "parts", "statistics", "grad_log_probs", "grad_total", "grad_entropy"),
        "*bf16": ("out", "bias"),
        "*i64": ("labels",),
        "i32": ("first", "num_tokens", "num_columns"),
        "fp32": ("inner", "outer"),
    }
    types = {name: dtype for dtype, names in pointers.items() for name in names}
    flags = {"HAS_BIAS": bias, "SOFTCAP": softcap, "HAS_ENTROPY": True, "BLOCK": 4096}
    for kernel in (head_kernels._add_kernel, head_kernels._gradient_kernel):
        names = kernel.arg_names
        source = ASTSource(
            fn=kernel,
            signature={name: types.get(name, "constexpr") for name in names},
            constexprs={(i,): flags[name] for i, name in enumerate(names) if name in flags},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
        assert "sm_90" in compiled.asm["ptx"]


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_kernels_in_triton_interpreter():
    pytest.importorskip("triton")
    run_in_interpreter(__file__, "TestKernels")
