"""What one line of the table measures, and how."""

import re
from dataclasses import dataclass

WORDS = {
    "megatron": "the Megatron engine instead of FSDP2",
    "plain": "a loop written by hand: transformers with torch SDPA, padded rows, logits of all tokens",
    "sorted": "of a plain loop: rows sorted by length, so that less is padded",
    "ckpt": "layers are recomputed in the backward pass",
    "selective": "layers are recomputed but for matrix products and attention",
    "compile": "layers are compiled",
    "bf16": "master weights and optimizer state in bfloat16 (else float32)",
    "zero2": "weights stay gathered from forward to backward (FSDP2)",
    "overlap": "gradients are reduced and weights gathered beside the computation (Megatron)",
    "te": "layers are made of Transformer Engine (Megatron)",
    "local": "they are not, though it is installed (Megatron)",
    "balanced": "tokens go to experts drawn at random, evenly, unlike those of random routers (Megatron)",
    "logprobs": "no training: log-probs from hidden states, fused and plain",
}

SIZES = {
    "tp": "ranks of tensor parallelism, with sequence parallelism (Megatron)",
    "pp": "pipeline stages (Megatron)",
    "ep": "ranks of expert parallelism (Megatron)",
    "last": "layers of the last pipeline stage; without, as many as others have (Megatron)",
    "micro": "tokens of a micro-batch, for each data-parallel rank",
}
"""Words with a number behind them, such as "tp2"."""

_NOT_OF_MEGATRON = {"plain", "sorted", "selective", "compile", "bf16", "zero2", "logprobs"}
_OF_MEGATRON = {"overlap", "te", "local", "balanced"}

PATIENCE_S = 150.0
"""How long a case may be silent: it loads, compiles, and makes its first step."""

ENVIRONMENT = {
    # NVLink multicast can put GPUs that others share out of service.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # All on one machine, whatever its host name resolves to.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # Sizes change from micro-batch to micro-batch.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much of each case is run.

    Attributes:
        steps: that are measured.
        case_s: after which no further step is begun; one is measured anyway.
        profile: whether one more step, of two micro-batches, is recorded by torch's profiler.
        device: "cuda" or "cpu".
    """

    steps: int = 3
    case_s: float = 25.0
    profile: bool = False
    device: str = "cuda"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model on some GPUs, trained in one way.

    Attributes:
        model: a name in `MODELS`.
        words: some of `WORDS`; none: the FSDP2 engine as it comes.
        num_gpus: processes, one for each GPU (or so many on the CPU).
        tp, pp, ep: sizes of Megatron's tensor, pipeline and expert parallelism.
        last: layers of the last pipeline stage; 0: as many as others have.
        tokens: of a step, for each GPU.
        micro_tokens: that a micro-batch may have on a data-parallel rank; padded ones for a plain loop.
    """

    model: str
    words: tuple[str, ...]
    num_gpus: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    last: int = 0
    tokens: int = 1
    micro_tokens: int = 1

    @property
    def backend(self) -> str:
        return "megatron" if "megatron" in self.words else "fsdp2"

    @property
    def name(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "last": self.last}
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
        """What its processes need besides `ENVIRONMENT`, before they start."""
        # Communication of tensor parallelism goes on beside kernels only if it is begun before them.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if self.tp > 1 else {}


TOKENS = {"0.6b": 131072, "1.7b": 98304, "4b": 65536, "8b": 49152, "moe": 65536, "moe16": 65536, "tiny": 256}
"""Of a step, for each GPU."""

_MICRO_TOKENS = {  # as they come; compiled; with recomputation; in a plain loop, where logits of all tokens have to fit
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


def parse(text: str, *, num_gpus: int, tokens: int | None, micro_tokens: int | None) -> Case:
    """The case that is written "model:words", such as "8b:ckpt+compile"; "base" says nothing.

    Args:
        tokens, micro_tokens: None takes the model's own; tensor-parallel ranks have so many each, but together in a
            pipeline, which wants many micro-batches.

    Raises:
        ValueError: an unknown model or word, or sizes that the number of GPUs cannot be divided by.
    """
    model, _, said = text.partition(":")
    if model not in TOKENS:
        raise ValueError(f"unknown model {model!r} in {text!r}; they are {', '.join(TOKENS)}")
    sizes, words = dict.fromkeys(SIZES, 0), []
    for word in said.split("+"):
        match = re.fullmatch(r"([a-z]+)([1-9]\d*)", word)
        if match and match[1] in SIZES:
            sizes[match[1]] = int(match[2])
        elif word != "base":
            words.append(word)
    unknown = sorted(set(words) - set(WORDS))
    if unknown:
        raise ValueError(f"unknown words {', '.join(unknown)} in {text!r}; they are {', '.join([*WORDS, *SIZES])}")
    tp, pp, ep = (sizes[kind] or 1 for kind in ("tp", "pp", "ep"))
    unfit = _NOT_OF_MEGATRON & set(words) if "megatron" in words else _OF_MEGATRON & set(words)
    if unfit or (tp * pp * ep > 1 and "megatron" not in words):
        raise ValueError(f"{text!r}: what is of one backend is not of the other")
    if num_gpus % (tp * pp) or num_gpus % (ep * pp):
        raise ValueError(f"{text!r}: {num_gpus} GPUs cannot be divided by tp {tp}, pp {pp}, ep {ep}")
    base, compiled, recomputed, plain = _MICRO_TOKENS[model]
    own = recomputed if "ckpt" in words else compiled if "compile" in words else base
    own *= tp if pp == 1 else 1
    default = (plain if "plain" in words else own) if micro_tokens is None else micro_tokens
    return Case(
        model=model,
        words=tuple(words),
        num_gpus=num_gpus,
        tp=tp,
        pp=pp,
        ep=ep,
        last=sizes["last"],
        tokens=TOKENS[model] if tokens is None else tokens,
        micro_tokens=sizes["micro"] or default,
    )
