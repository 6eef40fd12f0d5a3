"""Supported models and arguments; all others are refused before a process is started."""

from typing import Any

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2ForSequenceClassification",
)
# In sglang.srt.models.
SUPPORTED_MODULES = {"llama", "qwen2", "qwen2_classification", "qwen2_moe", "qwen3", "qwen3_moe"}
SUPPORTED_DTYPES = ("float32", "bfloat16")
_SCOPE = (
    "tidemill-sglang-cpu supports models with full causal MHA or GQA attention "
    f"({', '.join(SUPPORTED_ARCHITECTURES)}) in {' or '.join(SUPPORTED_DTYPES)}"
)


def check_model(hf_config: Any) -> None:
    """Raise ValueError with the architecture and the reason for a Hugging Face config that is not supported."""
    architectures = hf_config.architectures or ["(none)"]
    name = architectures[0]
    if name in SUPPORTED_ARCHITECTURES:
        fields = hf_config.to_dict()
        if fields.get("quantization_config") is not None:
            raise ValueError(f"{name} with quantized weights is not supported: {_SCOPE}")
        if fields.get("use_sliding_window"):
            raise ValueError(f"{name} with use_sliding_window=true is not supported: {_SCOPE}")
        return
    reason = ""
    if getattr(hf_config, "kv_lora_rank", None) is not None:
        reason = " (it uses multi-head latent attention, MLA)"
    raise ValueError(f"model architecture {name}{reason} is not supported on this platform. {_SCOPE}")


def resolve_dtype(requested: str, hf_config: Any) -> str:
    """Resolve SGLang's `dtype` argument; "auto" is the checkpoint's dtype, also where SGLang would use float16.

    Raises:
        ValueError: the dtype is neither float32 nor bfloat16.
    """
    name = {"float": "float32"}.get(requested, requested)
    if name == "auto":
        name = str(hf_config.dtype or "float32").removeprefix("torch.")
    if name not in SUPPORTED_DTYPES:
        raise ValueError(f"dtype {name!r} is not supported: pass dtype='float32' or dtype='bfloat16'. {_SCOPE}")
    return name


def check_arguments(server_args: Any) -> None:
    """Raise ValueError for SGLang arguments that this platform does not support."""
    refused = {
        "device": server_args.device != "cpu",
        # SGLang sets "intel_amx" (x86) or "torch_native" (ARM) if the user passes nothing.
        "attention_backend": server_args.attention_backend not in (None, "intel_amx", "torch_native"),
        "decode_attention_backend": server_args.decode_attention_backend not in (None, "torch_native"),
        "prefill_attention_backend": server_args.prefill_attention_backend not in (None, "torch_native"),
        "quantization": server_args.quantization is not None,
        "speculative_algorithm": server_args.speculative_algorithm is not None,
        "enable_lora": bool(server_args.enable_lora),
        "page_size": server_args.page_size not in (None, 1),
        "kv_cache_dtype": server_args.kv_cache_dtype != "auto",
        "pp_size": server_args.pp_size != 1,
        "dp_size": server_args.dp_size != 1,
        "ep_size": server_args.ep_size != 1,
        "enable_torch_compile": bool(server_args.enable_torch_compile),
    }
    names = [name for name, is_refused in refused.items() if is_refused]
    if names:
        passed = ", ".join(f"{name}={getattr(server_args, name)!r}" for name in names)
        raise ValueError(f"{passed} is not supported on this platform: leave it at its default. {_SCOPE}")
