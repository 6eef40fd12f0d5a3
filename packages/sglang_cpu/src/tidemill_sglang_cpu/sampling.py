"""Sampling with one seed per request, and repetition penalties, on the CPU."""

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_WORD = 0xFFFFFFFF


class SeededSampler(Sampler):
    """SGLang's sampler, with seeded draws that require neither Triton nor a C++ compiler.

    For deterministic inference SGLang hashes (seed, position, token) into Gumbel noise in a Triton kernel inside
    torch.compile. This class computes the same noise with tensor operations, so the same seed and logits give the same
    tokens as on a GPU. Without seeds it behaves like SGLang's sampler.
    """

    def _sample_from_probs(
        self,
        probs: torch.Tensor,
        sampling_info: SamplingBatchInfo,
        positions: torch.Tensor,
        simple_sampling_case: bool,
    ) -> torch.Tensor:
        """Sample from probs [B, V] float32; return token ids [B] int32."""
        seeds = sampling_info.sampling_seed
        if seeds is None:
            return super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        if simple_sampling_case:
            return gumbel_argmax(probs, seeds, positions).to(torch.int32)
        kept, token_ids = keep_top(probs, sampling_info)
        chosen = gumbel_argmax(kept, seeds, positions)
        return token_ids.gather(1, chosen[:, None]).view(-1).to(torch.int32)


def apply_scaling_penalties(logits: torch.Tensor, scaling_penalties: torch.Tensor) -> None:
    """Multiply negative logits [B, V] by their penalty and divide the others by it, in place, without torch.compile."""
    logits.copy_(torch.where(logits < 0, logits * scaling_penalties, logits / scaling_penalties))


def keep_top(probs: torch.Tensor, sampling_info: SamplingBatchInfo) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort `probs` [B, V] in descending order, and apply top-k, top-p and min-p; also return the sorted token ids."""
    kept, token_ids = probs.sort(dim=-1, descending=True, stable=True)
    before = kept.cumsum(dim=-1) - kept
    excluded = torch.arange(probs.shape[-1]) >= sampling_info.top_ks.view(-1, 1)
    excluded |= before > sampling_info.top_ps.view(-1, 1)
    if sampling_info.need_min_p_sampling:
        excluded |= kept < kept[:, :1] * sampling_info.min_ps.view(-1, 1)
    return kept.masked_fill(excluded, 0.0), token_ids


def gumbel_argmax(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw one column per row of `probs` [B, V] (unnormalized) from the row's seed and position [B]; return [B].

    A column with probability 0 is never drawn. On a GPU, SGLang draws the column whose hash is 2**32 - 1 regardless of
    its probability, about once in 2**32 / V tokens.
    """
    columns = torch.arange(probs.shape[-1])
    uniform = (murmur_hash32(seeds, positions, columns).to(torch.float64) / _WORD).clamp(max=1 - 0.5 / _WORD)
    noise = -(-uniform.log().clamp(min=torch.finfo(torch.float64).min)).log()
    return (probs.to(torch.float64).log() + noise).argmax(dim=-1)


def murmur_hash32(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 of (seed, position, column): [B], [B], [V] -> [B, V] int64 in 0..2**32-1.

    Same function as in sglang/kernels/ops/sampling/murmur_hash.py, in int64 arithmetic. Products overflow, but their
    low 32 bits are correct.
    """
    seeds, positions = seeds.long(), positions.long()
    state = _mix(torch.zeros_like(seeds), seeds & _WORD)
    state = _mix(state, (seeds >> 32) & _WORD)
    state = _mix(state, positions & _WORD)
    state = _mix(state[:, None], columns.long()[None, :]) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _WORD
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _WORD
    return state ^ (state >> 16)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _rotate((block * 0xCC9E2D51) & _WORD, 15)
    state = _rotate(state ^ ((block * 0x1B873593) & _WORD), 13)
    return (state * 5 + 0xE6546B64) & _WORD


def _rotate(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _WORD
