"""A sampling backend of SGLang, "tidemill": samples and computes log-probs in one pass over the logits.

SGLang's own backends make about 15 passes. Select it with `sampling_backend="tidemill"`; SGLang finds it as a plugin.
"""

import itertools
from typing import Any

import torch
from sglang.srt.layers.sampler import (
    SGLANG_RETURN_ORIGINAL_LOGPROB,
    Sampler,
    register_sampler_backend,
    top_k_top_p_min_p_sampling_from_probs_torch,
)

from tidemill_rollout.sampling_kernel import sample

NAME = "tidemill"


def register() -> None:
    """Make the backend known to SGLang; each of its processes calls this."""
    register_sampler_backend(NAME, OnePassSampler)


class OnePassSampler(Sampler):
    """Samples from the whole vocabulary in one pass; batches that need more take SGLang's way, with torch."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = itertools.count()

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return a token [B] int32 of each request, and set `logits_output.next_token_logprobs` [B]."""
        restricts = (
            sampling_info.need_top_p_sampling or sampling_info.need_top_k_sampling or sampling_info.need_min_p_sampling
        )
        asks_more = any(top_logprobs_nums) or any(ids is not None for ids in token_ids_logprobs)
        asks_more |= any(sampling_info.return_sampling_masks or ()) or SGLANG_RETURN_ORIGINAL_LOGPROB
        is_seeded = sampling_info.sampling_seed is not None or self.use_log_softmax_logprob
        logits = logits_output.next_token_logits
        if logits.device.type != "cuda" or sampling_info.is_all_greedy or restricts or asks_more or is_seeded:
            return super().forward(
                logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
            )
        tokens, log_probs = sample(
            self._preprocess_logits(logits, sampling_info),
            sampling_info.temperatures,
            seed=torch.initial_seed(),  # SGLang has set it: another one in each engine, equal on its ranks
            step=next(self._steps),
        )
        if return_logprob:
            logits_output.next_token_logprobs = log_probs
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, simple_sampling_case: bool
    ) -> torch.Tensor:
        if simple_sampling_case:
            return super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        return top_k_top_p_min_p_sampling_from_probs_torch(  # SGLang chooses by the name of the backend
            probs,
            sampling_info.top_ks,
            sampling_info.top_ps,
            sampling_info.min_ps,
            sampling_info.need_min_p_sampling,
            sampling_info.sampling_seed,
            positions,
        )
