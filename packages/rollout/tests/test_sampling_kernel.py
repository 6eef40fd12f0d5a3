"""The kernel that samples, against softmax in float64, on a GPU or in Triton's interpreter.

`test_kernel_in_triton_interpreter` runs this file again in a process that interprets kernels on the CPU.
"""

import os

import pytest
import torch
from tidemill_testing.interpreter import run_in_interpreter

pytest.importorskip("triton")

from tidemill_rollout.sampling_kernel import _sample, sample

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
on_device = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device")


def exact(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Compute log-probs [B, V] in float64."""
    return torch.log_softmax(logits.double() / temperatures.double().reshape(-1, 1), -1)


@on_device
class TestKernel:
    @pytest.mark.parametrize("num_tokens", [1, 1023, 4096, 4097, 9001])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_log_probs_are_those_of_the_tokens(self, num_tokens: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(num_tokens)
        wide = (5 * torch.randn(6, num_tokens + 3, generator=generator)).to(DEVICE, dtype)
        logits = wide[:, :num_tokens]  # rows that are not adjacent
        temperatures = torch.tensor([[0.3], [0.7], [1.0], [1.0], [2.0], [9.0]], device=DEVICE)
        tokens, log_probs = sample(logits, temperatures, seed=7, step=0)
        expected = exact(logits, temperatures).gather(1, tokens.long().unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(log_probs, expected.float(), atol=2e-5, rtol=1e-5)

    def test_frequencies_follow_the_distribution(self) -> None:
        num_rows = 400 if INTERPRETED else 100_000
        row = torch.tensor([0.0, 1.0, 2.0, 3.0, -torch.inf, -1.0, 0.5], device=DEVICE)
        logits, temperatures = row.expand(num_rows, -1).contiguous(), torch.full((num_rows, 1), 1.5, device=DEVICE)
        tokens, _ = sample(logits, temperatures, seed=11, step=5)
        counts = torch.bincount(tokens.long(), minlength=len(row)).double().cpu()
        expected = exact(row.unsqueeze(0), temperatures[:1]).exp()[0].cpu() * num_rows
        assert counts[4] == 0  # excluded
        seen = expected > 0
        chi_square = ((counts - expected)[seen].square() / expected[seen]).sum()
        assert chi_square < 22.5  # 5 degrees of freedom: p = 0.0004, for one fixed seed

    def test_rare_tokens_among_many_have_their_share(self) -> None:
        # Half of the mass is one token of the last block, the rest is spread over 20,000 tokens.
        num_rows, num_tokens = (64, 20_001) if INTERPRETED else (20_000, 20_001)
        logits = torch.zeros(num_rows, num_tokens, device=DEVICE)
        logits[:, -1] = torch.tensor(num_tokens - 1.0).log()
        tokens, _ = sample(logits, torch.ones(num_rows, device=DEVICE), seed=3, step=1)
        common = (tokens == num_tokens - 1).double().mean().item()
        assert abs(common - 0.5) < 4 * 0.5 / num_rows**0.5
        rare = tokens[tokens != num_tokens - 1].double().mean().item() / num_tokens
        assert abs(rare - 0.5) < 4 * (1 / 12) ** 0.5 / (num_rows / 2) ** 0.5

    def test_rows_and_steps_are_independent_and_seeds_repeat(self) -> None:
        logits, temperatures = torch.zeros(16, 9001, device=DEVICE), torch.ones(16, device=DEVICE)
        first, again, later, other = (
            sample(logits, temperatures, seed=seed, step=step)[0] for seed, step in [(1, 0), (1, 0), (1, 1), (2, 0)]
        )
        assert torch.equal(first, again)
        assert len(first.unique()) > 12
        assert (first == later).sum() <= 1
        assert (first == other).sum() <= 1

    def test_nan_makes_the_log_prob_nan(self) -> None:
        logits = torch.zeros(2, 5000, device=DEVICE)
        logits[0, 4321] = torch.nan
        _, log_probs = sample(logits, torch.ones(2, device=DEVICE), seed=1, step=1)
        assert log_probs.isnan().tolist() == [True, False]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
def test_kernel_compiles_for_hopper() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"logits": "*fp32", "temperatures": "*fp32", "tokens": "*i32", "log_probs": "*fp32"}
    numbers = {"stride": "i64", "num_tokens": "i32", "seed": "i64", "step": "i32"}
    source = ASTSource(
        fn=_sample, signature=types | numbers | {"PART": "constexpr"}, constexprs={(len(types) + len(numbers),): 1024}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "sm_90" in compiled.asm["ptx"]


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_kernel_in_triton_interpreter() -> None:
    run_in_interpreter(__file__, "TestKernel")
