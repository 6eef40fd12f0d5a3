"""The engine benchmark, `bench/engine.py`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture(scope="module", autouse=True)
def bench_on_path():
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))


def test_model_sizes_match_their_names():
    import torch
    import transformers
    from engine.shapes import MODELS

    sizes = {}
    for name, fields in MODELS.items():
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**fields))
        sizes[name] = sum(param.numel() for param in model.parameters()) / 1e9
    del sizes["tiny"]
    assert {name: round(size, 2) for name, size in sizes.items()} == {
        "0.6b": 0.6,
        "1.7b": 1.72,
        "4b": 4.02,
        "8b": 8.19,
        "moe": 15.58,
        "moe16": 10.59,
    }


def test_row_lengths_match_the_case():
    from engine.data import count_outputs, divide_rows, make_batch, row_lengths
    from tidemill_dataproto import ragged

    lengths = row_lengths(65536, shortest=512, longest=8192, seed=0)
    assert 65536 - 512 < sum(lengths) <= 65536
    assert min(lengths) >= 512
    assert max(lengths) > 4096
    batch = make_batch(lengths, 100, seed=0)
    assert ragged.lengths(batch["input_ids"]).tolist() == lengths
    assert ragged.lengths(batch["responses"]).tolist() == [length - length // 8 for length in lengths]
    assert count_outputs(lengths) == ragged.lengths(batch["responses"]).sum()
    assert divide_rows(lengths, 1) == [lengths]
    parts = divide_rows(lengths, 4)
    assert sorted(length for part in parts for length in part) == sorted(lengths)
    assert len({tuple(part) for part in parts}) == 4
    assert max(map(sum, parts)) < 1.1 * min(map(sum, parts))


def test_balanced_routing_uses_experts_evenly():
    import torch
    from engine.data import make_batch
    from tidemill_dataproto import ragged

    batch = make_batch([3000, 1000], 100, seed=0, experts=(2, 16, 4))
    experts = ragged.values(batch["routed_experts"])
    assert experts.shape == (4000, 2, 4)
    assert bool((experts.sort(-1).values.diff() > 0).all())
    counts = torch.nn.functional.one_hot(experts.long(), 16).sum((0, 2))
    assert ((counts - 1000).abs() < 150).all()


def test_case_names_describe_settings():
    from engine.case import parse

    def parsed(text: str, num_gpus: int = 4, **more: int) -> Any:
        return parse(text, num_gpus=num_gpus, tokens=None, micro_tokens=None, **more)

    case = parsed("8b:megatron+overlap+tp2+pp2")
    assert (case.backend, case.tp, case.pp, case.ep, case.micro_tokens) == ("megatron", 2, 2, 1, 8192)
    assert parsed("8b:megatron+tp4").micro_tokens == 32768
    assert case.key == "8b megatron+overlap+tp2+pp2 x4"
    assert case.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert parsed("moe:megatron+ep2+micro16384").micro_tokens == 16384
    assert parsed("8b:megatron+pp2+vpp2").key == "8b megatron+pp2+vpp2 x4"
    assert parsed("4b:compile", longest=16384).micro_tokens == 16384
    assert parsed("4b:compile", longest=1024).micro_tokens == 12288
    assert parsed("4b:base").key == "4b fsdp2 x4"
    assert not parsed("4b:compile").environment
    for text, said in (
        ("tiny:ckpt+fast", "unknown words fast"),
        ("30b:base", "unknown model '30b'"),
        ("4b:compile+tp2", "combines words of both backends"),
        ("4b:megatron+compile", "combines words of both backends"),
        ("4b:te", "combines words of both backends"),
        ("4b:megatron+tp8", "tp 8, pp 1 and ep 1 must divide the 4 GPUs"),
    ):
        with pytest.raises(ValueError, match=said):
            parsed(text)


def test_ratios_compare_best_cases(capsys):
    from engine.case import parse
    from engine.report import Report

    def add(words: str, tokens_per_s: float, *, num_gpus: int = 1) -> None:
        case = parse(f"4b:{words}", num_gpus=num_gpus, tokens=None, micro_tokens=None)
        mfu = tokens_per_s / num_gpus / 4e4
        result = {"tokens_per_s": tokens_per_s, "tflops": 1.0, "mfu": mfu, "mfu_range": (mfu - 0.01, mfu + 0.02)}
        report.add(case, result | {"peak_bytes": 1, "step_s": 1.0, "steps": [{}] * 5, "first_s": 1.0, "loss": 1.0})

    report = Report(None)
    add("base", 12000)
    add("compile", 20000)
    add("plain", 8000)
    add("plain+ckpt", 10000)
    add("plain+sorted", 16000)
    add("compile", 72000, num_gpus=4)
    add("megatron+tp2", 54000, num_gpus=4)
    case = parse("4b:bf16", num_gpus=1, tokens=None, micro_tokens=None)
    report.add(case, {"out_of_memory": "tried to allocate too much"})
    assert "30.0% 29.0% - 32.0%" in capsys.readouterr().out.splitlines()[0]
    report.close()
    assert capsys.readouterr().out.splitlines() == [
        "4b fsdp2+compile x1, masters fp32: MFU 50.0%, at least 45%: reached",
        "4b fsdp2+compile x4, masters fp32: MFU 45.0%, at least 45%: reached",
        "4b, masters fp32: fsdp2+compile trains 2.00 times as many tokens/s as plain+ckpt, at least 1.5: reached",
        "4b, masters fp32: fsdp2+compile trains 1.25 times as many tokens/s as plain+sorted",
        "4b megatron+tp2 x4: trains 0.75 times as many tokens/s as fsdp2+compile",
        "4b fsdp2+compile x4: 90.0% of what one GPU does, on each, at least 90%: reached",
    ]


def test_profile_groups_kernels():
    from engine.profile import covered, kind_of, summary

    kinds = {
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26": "attention",
        "nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_NNN": "matrix products",
        "_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xINS_4gemm6kernel": "matrix products",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedOptimizer": "optimizer",
        "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<c10::BFloat16": "norms",
        "triton_poi_fused__to_copy_add_cat_mul_rsub_sigmoid_silu_split_0": "compiled",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized": "copies, permutation",
        "void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>": "elementwise, reductions",
    }
    assert {name: kind_of(name) for name in kinds} == kinds
    assert covered([(5, 6), (0, 2), (1, 3), (1.5, 2)]) == 4
    # 10 us: 4 with a matrix product, 3 with communication only
    kernels = [("nvjet_1", 0.0, 4.0), ("ncclDevKernel_SendRecv", 2.0, 7.0)]
    lines = [line.split(maxsplit=3) for line in summary(kernels, 10e-6).splitlines()[1:]]
    assert [(share, count, kind) for _, share, count, kind in lines] == [
        ("50.0%", "1", "communication"),
        ("40.0%", "1", "matrix products"),
        ("30.0%", "0", "nothing but communication"),
        ("30.0%", "0", "nothing"),
    ]


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--models", "30b", "unknown models 30b; use some of 0.6b, "),
        ("--cases", "fast", "unknown words fast in 'tiny:fast'; use some of megatron, "),
        ("--cases", "30b:base", "unknown model '30b' in '30b:base'; use one of 0.6b, "),
        ("--cases", "megatron+tp4", "'tiny:megatron+tp4': tp 4, pp 1 and ep 1 must divide the 1 GPUs"),
    ],
)
def test_unknown_names_are_errors_of_the_command_line(option, value, reason):
    command = [sys.executable, str(BENCH / "engine.py"), "--models", "tiny", "--device", "cpu", option, value]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 2
    assert f"engine.py: error: argument {option}: {reason}" in run.stderr


def test_benchmark_runs_on_cpu(tmp_path):
    command = [sys.executable, str(BENCH / "engine.py"), "--models", "tiny", "--device", "cpu", "--steps", "2"]
    run = subprocess.run(
        [*command, "--cases", "logprobs,base,ckpt,plain,plain+sorted"],
        env=os.environ | {"OUT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout
    report = json.loads((tmp_path / "engine.json").read_text())
    cases = {case["case"]: case for case in report["cases"]}
    ours, plain = cases["tiny fsdp2 x1"], cases["tiny plain x1"]
    assert ours["tokens"] == plain["tokens"]
    first, second = ours["steps"]
    assert first["tflops"] * first["step_s"] != pytest.approx(second["tflops"] * second["step_s"])  # other lengths
    assert ours["tokens_per_s"] == pytest.approx((first["tokens_per_s"] + second["tokens_per_s"]) / 2)
    assert ours["loss"] == pytest.approx(plain["loss"], abs=0.05)  # other random weights
    assert cases["tiny fsdp2+ckpt x1"]["loss"] == pytest.approx(ours["loss"], rel=1e-6)
    assert cases["tiny logprobs x1"]["largest_difference"] < 1e-5
    assert re.search(r"tiny, masters fp32: fsdp2\S* trains [\d.]+ times as many tokens/s as plain", run.stdout)
