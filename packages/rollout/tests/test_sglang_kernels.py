"""The kernels that are compiled while SGLang starts; that SGLang uses these was checked on a GPU (bench/results)."""

import pytest
import torch
from transformers import DeepseekV3Config, Qwen2Config, Qwen3Config

pytest.importorskip("sglang")

from tidemill_rollout.sglang_kernels import kernels

SIZES = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}


def arguments(config, tp_size=1):
    found = kernels(config, torch.bfloat16, tp_size)
    return {kernel.func.__name__: kernel.args for kernel in found}


def test_kernels_have_the_sizes_of_a_rank():
    assert arguments(Qwen3Config(**SIZES, head_dim=128), tp_size=2) == {
        "_jit_fused_rope_module": (True, 128, torch.bfloat16, torch.bfloat16),
        "_jit_kvcache_module": (4 * 128 * 2, 4 * 128 * 2),
        "activation_module": (torch.bfloat16,),
        "_jit_clamp_position_module": (torch.int64,),
        "_jit_qknorm_module": (128, torch.bfloat16),
    }


def test_heads_of_keys_are_replicated_if_there_are_more_ranks():
    assert arguments(Qwen3Config(**SIZES, head_dim=128), tp_size=16)["_jit_kvcache_module"] == (256, 256)


def test_qknorm_is_compiled_for_qwen3_only():
    assert "_jit_qknorm_module" not in arguments(Qwen2Config(**SIZES))


def test_nothing_is_compiled_for_other_families():
    assert kernels(DeepseekV3Config(), torch.bfloat16, 1) == []
