"""Unsupported models and arguments: `sglang.Engine` refuses them before it starts a scheduler."""

import multiprocessing
import os

import pytest
import torch
import transformers
from tidemill_sglang_cpu.support import resolve_dtype
from tidemill_testing import tiny_model, tiny_reward_model

pytestmark = pytest.mark.sglang


def start(path, **arguments):
    import sglang

    return sglang.Engine(model_path=str(path), skip_tokenizer_init=True, log_level="error", **arguments)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            transformers.DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], num_hidden_layers=2),
            "DeepseekV3ForCausalLM .*latent attention.* not supported.*Qwen3ForCausalLM",
        ),
        (
            transformers.DeepseekV2Config(architectures=["DeepseekV2ForCausalLM"], num_hidden_layers=2),
            "DeepseekV2ForCausalLM .*latent attention",
        ),
        (transformers.Gemma2Config(architectures=["Gemma2ForCausalLM"]), "Gemma2ForCausalLM is not supported"),
        (transformers.FalconH1Config(architectures=["FalconH1ForCausalLM"]), "FalconH1ForCausalLM is not supported"),
        (
            transformers.Qwen2Config(architectures=["Qwen2ForCausalLM"], use_sliding_window=True),
            "Qwen2ForCausalLM with use_sliding_window",
        ),
    ],
    ids=lambda value: value.architectures[0] if isinstance(value, transformers.PretrainedConfig) else "",
)
def test_unsupported_model_is_refused_by_name(tmp_path, config, message):
    config.save_pretrained(tmp_path)
    before = multiprocessing.active_children()
    with pytest.raises(ValueError, match=message):
        start(tmp_path)
    assert multiprocessing.active_children() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float16"}, "dtype 'float16' is not supported"),
        ({"device": "cuda"}, "device='cuda' is not supported"),
        ({"attention_backend": "triton"}, "attention_backend='triton' is not supported"),
        ({"decode_attention_backend": "flashinfer"}, "decode_attention_backend='flashinfer' is not supported"),
        ({"prefill_attention_backend": "intel_amx"}, "prefill_attention_backend='intel_amx' is not supported"),
        ({"quantization": "fp8"}, "quantization='fp8' is not supported"),
        ({"dp_size": 2}, "dp_size=2 is not supported"),
        ({"tp_size": 2, "ep_size": 2}, "ep_size=2 is not supported"),
        ({"enable_torch_compile": True}, "enable_torch_compile=True is not supported"),
        ({"page_size": 16}, "page_size=16 is not supported"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype='fp8_e4m3' is not supported"),
        ({"pp_size": 2}, "pp_size=2 is not supported"),
    ],
)
def test_unsupported_argument_is_refused_by_name(llama, arguments, message):
    with pytest.raises(ValueError, match=message):
        start(llama, **arguments)


@pytest.mark.parametrize(
    ("requested", "checkpoint", "expected"),
    [
        ("auto", torch.float32, "float32"),
        ("auto", torch.bfloat16, "bfloat16"),
        ("auto", None, "float32"),
        ("float", torch.bfloat16, "float32"),
        ("bfloat16", torch.float32, "bfloat16"),
    ],
)
def test_auto_dtype_is_that_of_the_checkpoint(requested, checkpoint, expected):
    assert resolve_dtype(requested, transformers.Qwen3Config(dtype=checkpoint)) == expected


def test_float16_checkpoint_requires_a_dtype():
    with pytest.raises(ValueError, match="pass dtype="):
        resolve_dtype("auto", transformers.Qwen3Config(dtype=torch.float16))


def test_settings_of_tensor_parallel_ranks_do_not_affect_a_later_engine(llama, monkeypatch):
    from sglang.srt.server_args import ServerArgs

    name = "SGLANG_CPU_OMP_THREADS_BIND"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SGLANG_USE_MESSAGE_QUEUE_BROADCASTER", "0")  # restored afterwards
    for tp_size in (2, 4):
        ServerArgs(model_path=str(llama), tp_size=tp_size)
        assert os.environ[name].count("|") == tp_size - 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 4, 5})  # a container's share of a machine
    del os.environ[name]
    ServerArgs(model_path=str(llama), tp_size=2)
    assert os.environ[name] == "4,7|5"
    ServerArgs(model_path=str(llama))
    assert name not in os.environ
    monkeypatch.setenv(name, "0|0")  # set by a user
    ServerArgs(model_path=str(llama), tp_size=2)
    assert os.environ[name] == "0|0"


def test_reward_model_of_qwen2_is_supported_and_its_module_is_imported(tmp_path):
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.server_args import ServerArgs

    path = tiny_reward_model(tmp_path, "qwen2")
    assert ServerArgs(model_path=str(path), is_embedding=True).dtype == "float32"
    assert "Qwen2ForSequenceClassification" in ModelRegistry.get_supported_archs()


def test_platform_defaults(llama):
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path=str(llama))
    assert (args.device, args.dtype, args.sampling_backend) == ("cpu", "float32", "pytorch")
    assert (args.max_total_tokens, args.mem_fraction_static) == (65536, 0.6)
    assert args.disable_cuda_graph
    assert args.disable_overlap_schedule
    assert args.sleep_on_idle
    assert not args.disable_radix_cache
    explicit = ServerArgs(model_path=str(llama), max_total_tokens=512, mem_fraction_static=0.2, dtype="bfloat16")
    assert (explicit.dtype, explicit.max_total_tokens, explicit.mem_fraction_static) == ("bfloat16", 512, 0.2)
    named = ServerArgs(
        model_path=str(llama), decode_attention_backend="torch_native", prefill_attention_backend="torch_native"
    )
    assert named.attention_backend == "torch_native"
    deterministic = ServerArgs(model_path=str(llama), enable_deterministic_inference=True)
    assert deterministic.attention_backend == args.attention_backend
    assert not deterministic.disable_radix_cache
