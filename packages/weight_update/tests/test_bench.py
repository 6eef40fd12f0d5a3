"""The benchmark of this package, `bench/weight_update.py`."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tidemill_testing import run_ranks
from torch.distributed.device_mesh import init_device_mesh

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture(scope="module", autouse=True)
def bench_on_path():
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))


def test_benchmark_models_have_their_nominal_sizes():
    from weight_update.shapes import DENSE, MOE, weights_of

    sizes = {len(weights): sum(w.num_bytes for w in weights) for weights in map(weights_of, (DENSE, MOE))}
    assert {count: round(size / 1e9, 1) for count, size in sizes.items()} == {399: 16.4, 9435: 31.2}


def test_tiny_model_has_the_shapes_of_transformers():
    import transformers
    from weight_update.shapes import TINY, weights_of

    config = transformers.Qwen3Config(**TINY)
    shapes = {name: tuple(p.shape) for name, p in transformers.Qwen3ForCausalLM(config).named_parameters()}
    assert {w.name: w.shape for w in weights_of(TINY)} == shapes


def test_small_moe_has_the_size_of_transformers():
    import transformers
    from weight_update.shapes import MOE, weights_of

    config = MOE | {"num_hidden_layers": 2, "num_experts": 4}
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**config))
    weights = weights_of(config)
    assert sum(w.num_bytes // 2 for w in weights) == sum(p.numel() for p in model.parameters())


def test_bytes_moved_between_gpus():
    from weight_update.shapes import Weight, needed_bytes, rows_held
    from weight_update.shapes import moved_bytes as moved_from

    def moved_bytes(weights, num_trainers, tp_size, **placement):
        return moved_from(weights, rows_held(weights, num_trainers), tp_size, **placement)

    rows, columns = Weight("rows", (8, 4), 0), Weight("columns", (8, 4), 1)
    everywhere = Weight("everywhere", (8,), None)
    # Same sharding on both sides: no bytes move. Across: a rank already has a quarter of the bytes that it needs.
    assert moved_bytes([rows], 4, 4, separate=False) == 0
    assert moved_bytes([columns], 4, 4, separate=False) == 3 * (2 * 1) * 2
    assert moved_bytes([everywhere], 4, 4, separate=False) == 3 * 2 * 2
    # On separate GPUs all bytes that the engine needs move: half of the sharded tensors, all of the replicated one.
    assert moved_bytes([rows, columns], 2, 2, separate=True) == (16 + 16) * 2
    assert moved_bytes([everywhere], 2, 2, separate=True) == 8 * 2
    # One trainer rank sends everything to two engine ranks.
    assert moved_bytes([rows], 1, 2, separate=True) == 32 * 2
    assert needed_bytes([rows, columns, everywhere], 2) == (16 + 16 + 8) * 2
    # Two engines: each GPU needs a second half, or the half of an engine rank that shares no GPU with its holder.
    assert moved_bytes([rows], 2, 1, separate=False, num_engines=2) == 16 * 2
    assert moved_bytes([rows], 4, 2, separate=False, num_engines=2) == 16 * 2
    # Both trainer ranks have the whole tensor: no bytes move to them, and each sends half to others.
    both = [{"everywhere": [((0,), (8,))]}] * 2
    assert moved_from([everywhere], both, 2, separate=False) == 0
    assert moved_from([everywhere], both, 1, separate=True) == 8 * 2
    assert moved_from([everywhere], both, 4, separate=True) == 4 * 8


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (1, 4)])
def test_shards_of_megatron_ranks_cover_the_model(tp, ep):
    from weight_update.megatron import MegatronLayout
    from weight_update.shapes import MOE, weights_of

    config = MOE | {"num_hidden_layers": 2, "num_experts": 4, "hidden_size": 64, "vocab_size": 63 * 2}
    shapes = {weight.name: weight.shape for weight in weights_of(config)}
    counts = {name: torch.zeros(shape, dtype=torch.int8) for name, shape in shapes.items()}
    for held in MegatronLayout(tp=tp, ep=ep).boxes(config):
        for name, boxes in held.items():
            for start, shape in boxes:
                counts[name][tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))] += 1
    for name, count in counts.items():
        is_replicated = "norm" in name or name.endswith("mlp.gate.weight")
        assert count.unique().tolist() == [tp * ep if is_replicated else 1 if ".experts." in name else ep], name


def test_lower_bound_is_the_local_copy_if_no_bytes_move():
    from weight_update.case import CASES
    from weight_update.floor import floors_of
    from weight_update.shapes import weights_of

    found = {}
    for name in ("tiny", "dense2", "megatron4", "dense2x2", "moe8"):
        case = CASES[name] if name == "tiny" else CASES[name].tiny()
        floors = floors_of(case, weights_of(case.config))
        assert all(floor.seconds > 0 for floor in floors)
        found[name] = len(floors)
    assert found == {"tiny": 1, "dense2": 2, "megatron4": 1, "dense2x2": 2, "moe8": 2}


def test_batches_contain_whole_items_in_order():
    from weight_update.shapes import batches

    assert batches([("a", 3), ("b", 3), ("c", 9), ("d", 1), ("e", 4)], 6) == [["a", "b"], ["c"], ["d", "e"]]


def test_cases_of_two_gpus_share_the_tiny_form_of_four():
    from dataclasses import replace

    from weight_update.case import CASES

    names = ("moe1", "moe2", "dense2", "dense2e2", "moe4", "dense2x2", "moe8")
    assert [CASES[name].num_gpus for name in names] == [1, 2, 2, 2, 4, 4, 8]
    tiny = CASES["moe4"].tiny()
    assert all(replace(CASES[name].tiny(), name=tiny.name) == tiny for name in ("moe2", "dense2"))
    two = CASES["moe8"].tiny()
    assert (two.num_trainers, two.num_engines, two.tp_size) == (2, 2, 1)
    assert replace(CASES["dense2e2"].tiny(), name=two.name) == two


@pytest.mark.parametrize("changes", [{"separate": True}, {"num_trainers": 4}])
def test_several_engines_must_share_the_gpus_of_the_trainer(changes):
    from dataclasses import replace

    from weight_update.case import CASES

    with pytest.raises(ValueError, match=r"moe8: several engines must share the trainer's GPUs.* their 8 ranks, got"):
        replace(CASES["moe8"], **changes)


class Probed:
    """Engines whose ranks answer `compare` with these names, by engine and rank."""

    def __init__(self, *answers):
        self.answers = answers

    def __len__(self):
        return len(self.answers)

    def probe(self, operation):
        assert operation == "compare"
        return self.answers


def test_wrong_parameters_of_any_engine_are_an_error():
    from weight_update.check import _expect

    assert _expect(Probed([[], []], [[], []]), set()) == set()
    assert _expect(Probed([["b"], ["b"]], [["b"], []]), None) == {"b"}
    with pytest.raises(RuntimeError, match=r"1 parameters of engine 1 of 2 .*\(a\), expected none"):
        _expect(Probed([[]], [["a"]]), set())
    with pytest.raises(RuntimeError, match=r"0 parameters of engine 1 of 2 .*, expected b"):
        _expect(Probed([["b"]], [[]]), None)
    with pytest.raises(RuntimeError, match=r"2 parameters of engine 0 of 2 .*, expected one"):
        _expect(Probed([["a"], ["b"]], [["a"]]), None)


class Called:
    """Engines that record their requests."""

    def __init__(self, num_engines):
        self.engines = [
            SimpleNamespace(index=index, update=partial(self.update, index)) for index in range(num_engines)
        ]
        self.requests = {}

    def update(self, index, request):
        self.requests[index] = request

    def at_once(self, action):
        for engine in self.engines:
            action(engine)


def request_of_each_engine(num_engines, bench):
    sys.path.insert(0, bench)
    from weight_update.stock import Entrance

    rank, tp_size = torch.distributed.get_rank(), torch.distributed.get_world_size() // num_engines
    mesh = init_device_mesh("cpu", (num_engines, tp_size), mesh_dim_names=("engine", "tp"))
    engines = Called(num_engines if rank == 0 else 0)
    if rank % tp_size == 0:
        asyncio.run(Entrance(engines, mesh).update_weights_from_tensor(f"from rank {rank}"))
    return engines.requests


@pytest.mark.parametrize(
    ("num_engines", "expected"), [(1, {0: "from rank 0"}), (2, {0: "from rank 0", 1: "from rank 2"})]
)
def test_each_engine_gets_the_request_of_its_first_trainer_rank(num_engines, expected):
    requests, *others = run_ranks(request_of_each_engine, 4, num_engines, str(BENCH))
    assert requests == expected
    assert others == [{}] * 3


def test_case_with_too_few_gpus_is_refused_before_it_starts():
    run = subprocess.run(
        [sys.executable, BENCH / "weight_update.py", "--case", "moe2", "--case", "tiny", "--case", "dense2x2"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.splitlines()[-1] == (
        "too few GPUs: moe2 needs 2, dense2x2 needs 4, 0 are visible; --scale tiny runs any case without one"
    )


RANKS = """
import subprocess, sys, time
from pathlib import Path
from weight_update.supervisor import run_ranks

def main(rank, folder, report, what):
    report("note", f"rank {rank} has {Path(folder).is_dir()}")
    has_child = Path(folder) / "has_child"
    if what == "fail" and rank == 1:
        while not has_child.exists():
            time.sleep(0.01)
        raise ValueError("as it should")
    if what != "end" and rank == 0:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        report("child", child.pid)
        has_child.touch()
        time.sleep(600)

if __name__ == "__main__":
    show = lambda kind, value: print(kind, value, flush=True)
    run_ranks(main, 2, (sys.argv[1],), show, silence_s=15, limit_s=200)
"""


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("end", None),
        ("fail", r"rank 1: (.|\n)*as it should"),
        ("hang", r"ranks \[0\] did not finish: they sent no message"),
    ],
)
def test_supervisor_stops_all_processes_of_ranks_that_finish_fail_or_hang(what, error, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    run = subprocess.run(
        [sys.executable, script, what],
        env=os.environ | {"PYTHONPATH": str(BENCH)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    output = dict(line.rsplit(" ", 1) for line in run.stdout.splitlines())
    assert (output["note rank 0 has"], output["note rank 1 has"]) == ("True", "True")
    if error is None:
        assert run.returncode == 0, run.stderr
        return
    assert run.returncode == 1
    assert re.search(error, run.stderr)
    with suppress(FileNotFoundError, ProcessLookupError):  # a killed process may take a moment to exit
        while "State:\tZ" not in Path("/proc", output["child"], "status").read_text():
            time.sleep(0.01)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(480)  # two engines start one after the other
@pytest.mark.parametrize("case", ["tiny", "dense2", "megatron4", "dense2x2", "moe8"])
def test_benchmark_runs_without_a_gpu(case, tmp_path):
    run = subprocess.run(
        [sys.executable, BENCH / "weight_update.py", "--case", case, "--scale", "tiny", "--repeats", "2"],
        env=os.environ | {"OUT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=450,
    )
    assert run.returncode == 0, run.stdout
    (path,) = tmp_path.glob("weight_update_*.json")
    result = json.loads(path.read_text())
    assert result["error"] is None
    assert result["facts"]["checked"]
    methods = {timing["method"]: timing for timing in result["timings"]}
    assert "ours" in methods
    assert any("one call per tensor" in method for method in methods)
    assert all(timing["minimum"] > 0 for timing in methods.values())
    assert all(stats["verified"] for stats in methods["ours"]["stats"])
    assert result["verdict"]["speedup"] > 0
    assert result["verdict"]["floor_ratio"] > 0
    assert run.stdout.splitlines()[-1].startswith(result["case"])
