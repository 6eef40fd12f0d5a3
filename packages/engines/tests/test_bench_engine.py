"""The benchmark of this package, `bench/engine.py`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture(scope="module", autouse=True)
def bench_on_path():
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))


def test_the_models_have_the_sizes_that_they_are_named_for():
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
    }


def test_rows_are_of_the_lengths_that_are_said():
    from engine.data import make_batch, row_lengths
    from tidemill_dataproto import ragged

    lengths = row_lengths(65536, shortest=512, longest=8192, seed=0)
    assert 65536 - 512 < sum(lengths) <= 65536
    assert min(lengths) >= 512
    assert max(lengths) > 4096
    batch = make_batch(lengths, 100, seed=0)
    assert ragged.lengths(batch["input_ids"]).tolist() == lengths
    assert ragged.lengths(batch["responses"]).tolist() == [length - length // 8 for length in lengths]


def test_words_that_nobody_knows_are_refused():
    from engine.case import parse

    with pytest.raises(ValueError, match="unknown words fast"):
        parse("tiny", "ckpt+fast", num_gpus=1, backend="fsdp2", sizes=(1, 1, 1), tokens=None, micro_tokens=None)


def test_ratios_are_those_of_the_best_cases(capsys):
    from engine.case import parse
    from engine.report import Report

    def add(words: str, tokens_per_s: float, *, num_gpus: int = 1) -> None:
        case = parse("4b", words, num_gpus=num_gpus, backend="fsdp2", sizes=(1, 1, 1), tokens=None, micro_tokens=None)
        result = {"tokens_per_s": tokens_per_s, "tflops": 1.0, "mfu": tokens_per_s / 4e4, "peak_bytes": 1 << 30}
        report.add(case, result | {"step_s": 1.0, "steps_s": [1.0], "first_s": 1.0, "loss": 1.0})

    report = Report(None)
    add("base", 12000)
    add("compile", 20000)
    add("plain", 8000)
    add("plain+ckpt", 10000)
    add("plain+sorted", 16000)
    add("compile", 72000, num_gpus=4)
    case = parse("4b", "bf16", num_gpus=1, backend="fsdp2", sizes=(1, 1, 1), tokens=None, micro_tokens=None)
    report.add(case, {"out_of_memory": "tried to allocate too much"})
    capsys.readouterr()
    report.close()
    assert capsys.readouterr().out.splitlines() == [
        "4b fsdp2+compile x1, masters fp32: MFU 50.0%, at least 45%: reached",
        "4b, masters fp32: fsdp2+compile trains 2.00 times as many tokens/s as plain+ckpt, at least 1.5: reached",
        "4b, masters fp32: fsdp2+compile trains 1.25 times as many tokens/s as plain+sorted",
        "4b fsdp2+compile x4: 90.0% of what one GPU does, on each, at least 90%: reached",
    ]


def test_the_benchmark_runs_without_a_gpu(tmp_path):
    command = [sys.executable, str(BENCH / "engine.py"), "--models", "tiny", "--device", "cpu", "--steps", "1"]
    run = subprocess.run(
        [*command, "--cases", "logprobs,base,ckpt,plain,plain+sorted"],
        env=os.environ | {"OUT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout
    report = json.loads((tmp_path / "engine.json").read_text())
    cases = {case["case"]: case for case in report["cases"]}
    ours, plain = cases["tiny fsdp2 x1"], cases["tiny plain x1"]
    assert ours["tokens"] == plain["tokens"]
    assert ours["loss"] == pytest.approx(plain["loss"], abs=0.05)  # other weights of the same kind
    assert cases["tiny fsdp2+ckpt x1"]["loss"] == pytest.approx(ours["loss"], rel=1e-6)
    assert cases["tiny logprobs x1"]["largest_difference"] < 1e-5
    assert re.search(r"tiny, masters fp32: fsdp2\S* trains [\d.]+ times as many tokens/s as plain", run.stdout)
