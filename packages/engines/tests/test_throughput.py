"""Operation counts against torch's FlopCounter, and the speed of a step."""

import time

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, plain_model, policy_like_loss, shard
from tidemill_dataproto import ragged
from tidemill_engines.config import LoraConfig
from tidemill_engines.throughput import Meter, known_peak_tflops, training_flops
from tidemill_testing import run_ranks, tiny_model


def counted_flops(model, length):
    """Count the operations of a step of one row with torch; eager attention computes all pairs of tokens."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(1, length, dtype=torch.int64)).logits.sum().backward()
    return counter.get_total_flops()


MIXTURES = {
    "qwen3_moe": {"moe_intermediate_size": 48, "head_dim": 16, "num_experts": 6},
    "mixtral": {"intermediate_size": 48, "num_local_experts": 6},  # its head_dim is None
    "deepseek_v3": {
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "n_routed_experts": 6,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 20,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", *MIXTURES])
@pytest.mark.parametrize("tied", [True, False])
def test_flops_equal_torch_flop_counter(tmp_path, family, tied):
    if family in MIXTURES:
        import transformers

        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_experts_per_tok": 2}
        sizes |= {"num_key_value_heads": 4 if family == "deepseek_v3" else 2} | MIXTURES[family]
        config = transformers.AutoConfig.for_model(family, vocab_size=VOCAB, tie_word_embeddings=tied, **sizes)
        assert family != "mixtral" or config.head_dim is None
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
    else:
        model = plain_model(tiny_model(tmp_path / "model", family, vocab_size=VOCAB, tie_word_embeddings=tied))
    for length in (17, 40):
        flops = training_flops(model, [length], num_outputs=length)
        all_pairs = flops.attention * length**2 / (length * (length + 1) / 2)
        assert flops.linear + all_pairs == pytest.approx(counted_flops(model, length), rel=2e-3)


def test_flops_of_models_with_names_of_their_own():
    import transformers

    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.GPT2Config(n_positions=64, n_embd=64, n_layer=2, n_head=4, vocab_size=VOCAB)
    gpt2 = transformers.AutoModelForCausalLM.from_config(config)
    flops = training_flops(gpt2, [10], num_outputs=10)
    assert flops.attention == 12 * 2 * 4 * 16 * 55
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "intermediate_size": 96}
    config = transformers.AutoConfig.for_model("ernie4_5_moe", num_key_value_heads=2, **sizes, **experts)
    model = transformers.AutoModelForCausalLM.from_config(config)
    stacked = [param for name, param in model.named_parameters() if param.dim() == 3 and ".experts." in name]
    assert stacked
    found = training_flops(model, [10], num_outputs=10)
    config.moe_k = 4
    more = training_flops(model, [10], num_outputs=10)
    assert more.linear - found.linear == pytest.approx(6 * 10 * sum(each.numel() for each in stacked) / 2)


def test_flops_of_frozen_weights_and_sliding_windows(tmp_path):
    model = plain_model(tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB, tie_word_embeddings=False))
    whole = training_flops(model, [10, 20], num_outputs=5)
    assert training_flops(model, [10], 5).attention + training_flops(model, [20], 5).attention == whole.attention
    model.requires_grad_(False)
    assert training_flops(model, [10, 20], num_outputs=5).linear == pytest.approx(whole.linear * 2 / 3)
    model.config.use_sliding_window, model.config.sliding_window = True, 4
    model.config.layer_types = ["full_attention", "sliding_attention"]
    seen = [sum(min(position + 1, window) for position in range(10)) for window in (10, 4)]
    assert training_flops(model, [10], 0).attention == 12 * 4 * 16 * sum(seen)


def test_meter_measures_time():
    times = iter([10.0, 12.5])
    meter = Meter(clock=lambda: next(times))
    with meter.step():
        pass
    assert meter.seconds == 2.5


def test_meter_adds_up_the_parts_of_the_last_step():
    times = iter([0.0, 1.0, 2.0, 3.0, 5.0, 6.0, 10.0])
    meter = Meter(clock=lambda: next(times))
    with meter.part("forward"):  # outside of a step
        pass
    with meter.step():
        for _ in range(2):
            with meter.part("forward"):
                pass
    assert (meter.parts, meter.seconds) == ({"forward": 3.0}, 6.0)
    assert meter.peak_memory_bytes > 1 << 20
    assert known_peak_tflops(torch.device("cpu"), "bfloat16") is None


def test_meter_ignores_failed_step():
    meter = Meter()
    batch = make_batch(4, seed=1)
    meter.count([batch])
    assert meter.lengths == []
    with meter.step():
        meter.count([batch[:3], batch[3:]])
    meter.count([batch])
    known = vars(meter).copy()
    assert meter.lengths == ragged.lengths(batch["input_ids"]).tolist()
    assert meter.num_outputs == len(ragged.values(batch["responses"]))
    with pytest.raises(TypeError), meter.step():
        meter.count([batch, None])
    assert vars(meter) == known


_WHOLE = {"perf/step_s", "perf/tokens_per_s"}


def run_measured(path, batch, layouts):
    out = []
    for layout in layouts:
        engine = build_engine(path, peak_tflops=0.5, **layout)
        rows = shard(engine, batch)
        started = time.perf_counter()
        engine.train_batch(rows, policy_like_loss, calculate_entropy=True)
        elapsed = time.perf_counter() - started
        engine.infer_batch(rows)
        out.append((engine.performance(), elapsed))
        engine.close()
    return out


def test_performance_covers_global_batch(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batch = make_batch(9, seed=1)
    lengths = ragged.lengths(batch["input_ids"]).tolist()
    flops = training_flops(plain_model(path), lengths, len(ragged.values(batch["responses"]))).total
    layouts = [
        {"max_token_len_per_gpu": 40},
        {"ulysses_sequence_parallel_size": 2},
        {"param_offload": True},
        {"backend": "megatron", "max_token_len_per_gpu": 40},
        {"backend": "megatron", "pipeline_model_parallel_size": 2},
    ]
    first, second = run_ranks(run_measured, 2, path, batch, layouts)
    for (metrics, elapsed), (other, other_elapsed) in zip(first, second, strict=True):
        assert metrics == other
        seconds = metrics["perf/step_s"]
        assert 0 < seconds <= max(elapsed, other_elapsed)
        assert metrics["perf/tokens_per_s"] * seconds == pytest.approx(sum(lengths))
        assert metrics["perf/tflops_per_rank"] * seconds * 2 * 1e12 == pytest.approx(flops)
        assert metrics["perf/mfu"] == pytest.approx(metrics["perf/tflops_per_rank"] / 0.5)
        assert 0.01 < metrics["perf/peak_memory_gib"] < 64
        parts = {name: value for name, value in metrics.items() if name.endswith("_s") and name not in _WHOLE}
        assert 0 < sum(parts.values()) <= seconds
        assert set(parts) - {"perf/offload_s"} in (
            {"perf/forward_s", "perf/backward_s", "perf/optimizer_s"},
            {"perf/forward_backward_s", "perf/optimizer_s"},
        )
    assert "perf/offload_s" in first[2][0]


def run_adapters(path):
    engine = build_engine(path, model={"lora": LoraConfig(rank=4)})
    flops = training_flops(engine.model, [10], 10).linear
    ranks = sum(param.numel() for name, param in engine.model.named_parameters() if "lora_" in name)
    engine.close()
    return flops, ranks


def test_flops_of_adapters(tmp_path):
    pytest.importorskip("peft")
    path = tiny_model(tmp_path / "model", "llama", vocab_size=VOCAB)
    model = plain_model(path).requires_grad_(False)
    for flops, ranks in run_ranks(run_adapters, 2, path):
        assert flops == pytest.approx(training_flops(model, [10], 10).linear + 6 * ranks * 10)
