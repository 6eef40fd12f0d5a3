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


def run_bench(folder: Path, *arguments: str) -> tuple[dict, str]:
    command = [sys.executable, str(BENCH / "engine.py"), "--models", "tiny", "--device", "cpu", "--steps", "1"]
    run = subprocess.run(
        [*command, *arguments],
        env=os.environ | {"OUT": str(folder), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout
    return json.loads((folder / "engine.json").read_text()), run.stdout


def test_the_benchmark_runs_without_a_gpu(tmp_path):
    report, printed = run_bench(tmp_path, "--cases", "logprobs,base,ckpt,plain,plain+sorted", "--gpus", "1,2")
    cases = {case["case"]: case for case in report["cases"]}
    one, two = cases["tiny fsdp2 x1"], cases["tiny fsdp2 x2"]
    assert two["tokens"] == 2 * one["tokens"]
    assert one["tokens"] == cases["tiny plain x1"]["tokens"]
    assert one["loss"] == pytest.approx(cases["tiny plain x1"]["loss"], abs=0.05)  # other weights of the same kind
    assert cases["tiny fsdp2+ckpt x1"]["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert cases["tiny logprobs x1"]["largest_difference"] < 1e-5
    assert re.search(r"tiny, masters fp32: fsdp2\S* trains [\d.]+ times as many tokens/s as plain", printed)
    assert re.search(r"tiny fsdp2 x2: [\d.]+% of what one GPU does", printed)
