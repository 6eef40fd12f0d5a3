"""The cases of the benchmark: one line of the table each."""

import re
from dataclasses import dataclass

from tidemill_engines import MegatronConfig

WORDS = {
    "megatron": "the Megatron engine instead of FSDP2",
    "plain": "plain loop: transformers with torch SDPA, padded rows, logits of all tokens",
    "sorted": "plain loop with rows sorted by length, which reduces padding",
    "ckpt": "recompute layers in the backward pass",
    "selective": "recompute layers except matrix products and attention",
    "compile": "compile layers",
    "bf16": "master weights and optimizer state in bfloat16 (default float32)",
    "offload": "keep weights, gradients and optimizer state on the CPU while they are not used",
    "zero2": "keep weights gathered from forward to backward (FSDP2)",
    "overlap": "overlap gradient reduction and weight all-gather with computation (Megatron)",
    "te": "layers of Transformer Engine (Megatron)",
    "local": "no Transformer Engine, even if installed (Megatron)",
    "balanced": "send tokens to random, evenly used experts instead of those of the random routers (Megatron)",
    "allgather": "gather tokens on all ranks that share the experts, also where this is not the default (Megatron)",
    "alltoall": "send tokens to their experts only, also where this is not the default (Megatron)",
    "logprobs": "no training: log-probs from hidden states, fused and plain",
}

SIZES = {
    "tp": "tensor-parallel ranks, with sequence parallelism (Megatron)",
    "pp": "pipeline stages (Megatron)",
    "vpp": "model chunks per pipeline stage, which take turns (Megatron)",
    "ep": "expert-parallel ranks (Megatron)",
    "last": "layers of the last pipeline stage; default: as many as in other stages (Megatron)",
    "micro": "tokens per micro-batch and data-parallel rank",
}
"""Words that are followed by a number, such as "tp2"."""

_NOT_OF_MEGATRON = {"plain", "sorted", "selective", "compile", "bf16", "zero2", "logprobs"}
_OF_MEGATRON = {"overlap", "te", "local", "balanced", "allgather", "alltoall"}

PATIENCE_S = 150.0
"""Maximum time without output of a case, which covers loading, compilation and its first step."""

ENVIRONMENT = {
    # NVLink multicast can break GPUs that other jobs share.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # All ranks are on one machine, whatever its host name resolves to.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # Sizes change from micro-batch to micro-batch.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Amount of work per case.

    Attributes:
        steps: number of measured steps, after two for warm-up.
        repeats: all steps have the same rows; else each step draws new lengths.
        rows: shortest and longest row in tokens; None: 512 and 8,192, or 8 and 64 for the tiny model.
        case_s: time in seconds after which no further step starts; at least one is measured.
        profile: whether to record one more step, of two micro-batches, with torch's profiler.
        device: "cuda" or "cpu".
    """

    steps: int = 5
    repeats: bool = False
    rows: tuple[int, int] | None = None
    case_s: float = 90.0
    profile: bool = False
    device: str = "cuda"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, a number of GPUs, and settings of the training.

    Attributes:
        model: name in `MODELS`.
        words: subset of `WORDS`; empty is the FSDP2 engine with default settings.
        num_gpus: number of processes, one per GPU.
        tp, pp, ep: sizes of Megatron's tensor, pipeline and expert parallelism.
        vpp: model chunks per pipeline stage.
        last: layers of the last pipeline stage; 0 is as many as in other stages.
        tokens: tokens per step and GPU.
        micro_tokens: maximum tokens of a micro-batch on a data-parallel rank; including padding for a plain loop.
    """

    model: str
    words: tuple[str, ...]
    num_gpus: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    last: int = 0
    tokens: int = 1
    micro_tokens: int = 1

    @property
    def backend(self) -> str:
        return "megatron" if "megatron" in self.words else "fsdp2"

    @property
    def name(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "ep": self.ep, "last": self.last}
        layout = [f"{kind}{size}" for kind, size in sizes.items() if size > 1]
        own = [] if {"plain", "logprobs", "megatron"} & set(self.words) else ["fsdp2"]
        return "+".join([*own, *self.words, *layout])

    @property
    def precision(self) -> str:
        return "bf16" if "bf16" in self.words else "fp32"

    @property
    def key(self) -> str:
        return f"{self.model} {self.name} x{self.num_gpus}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the processes require at their start, in addition to `ENVIRONMENT`."""
        return MegatronConfig(tensor_model_parallel_size=self.tp).environment


TOKENS = {"0.6b": 131072, "1.7b": 98304, "4b": 65536, "8b": 49152, "moe": 65536, "moe16": 65536, "tiny": 256}
"""Tokens per step and GPU."""

_MICRO_TOKENS = {  # default; compiled; with recomputation; in a plain loop, which needs memory for all logits
    "0.6b": (32768, 32768, 32768, 16384),
    "1.7b": (16384, 32768, 32768, 16384),
    "4b": (8192, 12288, 32768, 8192),
    "8b": (8192, 8192, 8192, 8192),
    "moe": (8192, 8192, 16384, 8192),
    "moe16": (8192, 8192, 16384, 8192),
    "tiny": (96, 96, 96, 96),
}

DEFAULT_CASES = {
    "0.6b": "base,compile,ckpt,plain",
    "1.7b": "base,compile,ckpt,plain",
    "4b": "logprobs,base,compile,compile+zero2,selective+compile,ckpt,ckpt+compile,plain,plain+sorted",
    "8b": "ckpt,ckpt+compile,bf16+compile,plain+ckpt,plain+bf16+ckpt,plain+bf16+ckpt+sorted",
    "moe": "ckpt",
    "moe16": "ckpt",
    "tiny": "logprobs,base,ckpt+compile,bf16,plain,plain+sorted",
}


def parse(text: str, *, num_gpus: int, tokens: int | None, micro_tokens: int | None, longest: int = 0) -> Case:
    """Parse a case "model:words", such as "8b:ckpt+compile"; "base" is ignored.

    Args:
        tokens, micro_tokens: None uses the model's default. The default of `micro_tokens` is per tensor-parallel rank,
            except in a pipeline, which requires many micro-batches.
        longest: tokens of the longest row, for which the default of `micro_tokens` has room.

    Raises:
        ValueError: an unknown model or word, or sizes that do not divide the number of GPUs.
    """
    model, _, listed = text.partition(":")
    if model not in TOKENS:
        raise ValueError(f"unknown model {model!r} in {text!r}; use one of {', '.join(TOKENS)}")
    sizes, words = dict.fromkeys(SIZES, 0), []
    for word in listed.split("+"):
        match = re.fullmatch(r"([a-z]+)([1-9]\d*)", word)
        if match and match[1] in SIZES:
            sizes[match[1]] = int(match[2])
        elif word != "base":
            words.append(word)
    unknown = sorted(set(words) - set(WORDS))
    if unknown:
        raise ValueError(f"unknown words {', '.join(unknown)} in {text!r}; use some of {', '.join([*WORDS, *SIZES])}")
    tp, pp, ep = (sizes[kind] or 1 for kind in ("tp", "pp", "ep"))
    unfit = _NOT_OF_MEGATRON & set(words) if "megatron" in words else _OF_MEGATRON & set(words)
    if unfit or (tp * pp * ep > 1 and "megatron" not in words):
        raise ValueError(f"{text!r} combines words of both backends; use words of one backend")
    if num_gpus % (tp * pp) or num_gpus % (ep * pp):
        raise ValueError(f"{text!r}: tp {tp}, pp {pp} and ep {ep} must divide the {num_gpus} GPUs")
    base, compiled, recomputed, plain = _MICRO_TOKENS[model]
    own = recomputed if "ckpt" in words else compiled if "compile" in words else base
    own *= tp if pp == 1 else 1
    default = max(longest, plain if "plain" in words else own) if micro_tokens is None else micro_tokens
    return Case(
        model=model,
        words=tuple(words),
        num_gpus=num_gpus,
        tp=tp,
        pp=pp,
        ep=ep,
        vpp=sizes["vpp"] or 1,
        last=sizes["last"],
        tokens=TOKENS[model] if tokens is None else tokens,
        micro_tokens=sizes["micro"] or default,
    )
