"""What one line of the table measures, and how."""

from collections.abc import Sequence
from dataclasses import dataclass

WORDS = {
    "plain": "a loop written by hand: transformers with torch SDPA, padded rows, logits of all tokens",
    "sorted": "of a plain loop: rows sorted by length, so that less is padded",
    "ckpt": "layers are recomputed in the backward pass",
    "selective": "layers are recomputed but for matrix products and attention",
    "compile": "layers are compiled",
    "bf16": "master weights and optimizer state in bfloat16 (else float32)",
    "zero2": "weights stay gathered from forward to backward (FSDP2)",
    "logprobs": "no training: log-probs from hidden states, fused and plain",
}


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
        words: some of `WORDS`; none: the engine as it comes.
        num_gpus: processes, one for each GPU (or so many on the CPU).
        backend: "fsdp2" or "megatron".
        tp, pp, ep: sizes of Megatron's tensor, pipeline and expert parallelism.
        tokens: of a step, for each GPU.
        micro_tokens: that a micro-batch may have; padded ones for a plain loop.
    """

    model: str
    words: tuple[str, ...]
    num_gpus: int = 1
    backend: str = "fsdp2"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    tokens: int = 1
    micro_tokens: int = 1

    @property
    def name(self) -> str:
        layout = [f"{kind}{size}" for kind, size in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep)) if size > 1]
        own = [] if {"plain", "logprobs"} & set(self.words) else [self.backend]
        return "+".join([*own, *self.words, *layout])

    @property
    def precision(self) -> str:
        return "bf16" if "bf16" in self.words else "fp32"

    @property
    def key(self) -> str:
        return f"{self.model} {self.name} x{self.num_gpus}"


TOKENS = {"0.6b": 131072, "1.7b": 98304, "4b": 65536, "8b": 49152, "moe": 65536, "tiny": 256}
"""Of a step, for each GPU."""

_MICRO_TOKENS = {  # as they come; compiled; with recomputation; in a plain loop, where logits of all tokens have to fit
    "0.6b": (32768, 32768, 32768, 16384),
    "1.7b": (16384, 32768, 32768, 16384),
    "4b": (8192, 12288, 32768, 8192),
    "8b": (8192, 8192, 8192, 8192),
    "moe": (8192, 8192, 16384, 8192),
    "tiny": (96, 96, 96, 96),
}

DEFAULT_CASES = {
    "0.6b": "base,compile,ckpt,plain",
    "1.7b": "base,compile,ckpt,plain",
    "4b": "logprobs,base,compile,compile+zero2,selective+compile,ckpt,ckpt+compile,plain,plain+sorted",
    "8b": "ckpt,ckpt+compile,bf16+compile,plain+ckpt,plain+bf16+ckpt,plain+bf16+ckpt+sorted",
    "moe": "ckpt",
    "tiny": "logprobs,base,ckpt+compile,bf16,plain,plain+sorted",
}


def parse(
    model: str,
    words: str,
    *,
    num_gpus: int,
    backend: str,
    sizes: Sequence[int],
    tokens: int | None,
    micro_tokens: int | None,
) -> Case:
    """The case of `words`, such as "ckpt+compile"; "base" says nothing.

    Args:
        sizes: tp, pp and ep.
        tokens, micro_tokens: None takes the model's own.

    Raises:
        ValueError: an unknown word, or sizes that the number of GPUs cannot be divided by.
    """
    chosen = tuple(word for word in words.split("+") if word != "base")
    unknown = sorted(set(chosen) - set(WORDS))
    if unknown:
        raise ValueError(f"unknown words {', '.join(unknown)} in {words!r}; they are {', '.join(WORDS)}")
    tp, pp, ep = sizes if backend == "megatron" else (1, 1, 1)
    if num_gpus % (tp * pp) or num_gpus % (ep * pp):
        raise ValueError(f"{num_gpus} GPUs cannot be divided by tp {tp}, pp {pp}, ep {ep}")
    base, compiled, recomputed, plain = _MICRO_TOKENS[model]
    own = recomputed if "ckpt" in chosen else compiled if "compile" in chosen else base
    return Case(
        model=model,
        words=chosen,
        num_gpus=num_gpus,
        backend=backend,
        tp=tp,
        pp=pp,
        ep=ep,
        tokens=TOKENS[model] if tokens is None else tokens,
        micro_tokens=(plain if "plain" in chosen else own) if micro_tokens is None else micro_tokens,
    )
