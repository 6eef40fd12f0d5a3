"""The sampling parameters that SGLang receives."""

from tidemill_rollout import SamplingParams
from tidemill_rollout.sglang import sglang_sampling


def test_request_without_a_seed_gets_a_fresh_one():
    """With deterministic inference, SGLang would use 42 for all of them."""
    seeds = [sglang_sampling(SamplingParams())["sampling_seed"] for _ in range(8)]
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_given_seed_is_sent():
    assert sglang_sampling(SamplingParams(seed=0))["sampling_seed"] == 0
