"""Stock SGLang engine, updated from other processes and from its own."""

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tidemill_testing import tiny_model
from tidemill_weight_update import WeightUpdater
from tidemill_weight_update.sglang import LocalEngine

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

PROMPT = [5, 6, 7, 8, 9]
SAMPLING = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}


class StockEngine(LocalEngine):
    """Client of an engine that was launched without the fast loader."""

    has_loader = False


@pytest.fixture(scope="module")
def checkpoints(checkpoint, tmp_path_factory) -> list[Path]:
    """Three checkpoints of one architecture: the engine starts with the first, the others are sent."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return [checkpoint, *(tiny_model(folder / str(s), "qwen3", seed=s, num_hidden_layers=3) for s in (1, 2))]


@pytest.fixture(scope="module")
def expected(checkpoints) -> dict[Path, list[int]]:
    """Greedy continuation of PROMPT by transformers, for each checkpoint."""
    return {path: greedy(path) for path in checkpoints}


def greedy(path: Path, dtype: torch.dtype = torch.float32) -> list[int]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).float()
    length = SAMPLING["max_new_tokens"]
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=length, do_sample=False, eos_token_id=None)
    return out[0, len(PROMPT) :].tolist()


def state(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def generate(engine) -> dict[str, Any]:
    (out,) = engine.generate(input_ids=[PROMPT], sampling_params=SAMPLING, return_logprob=True)
    return out


def probe(engine, name: str, path: Path) -> None:
    named = [(str(path), torch.zeros(1))]
    success, message = engine.update_weights_from_tensor(named, load_format=f"engine_probe.{name}", flush_cache=False)
    assert success, message


def parameters(engine, path: Path) -> dict[str, torch.Tensor]:
    probe(engine, "dump", path)
    return torch.load(path)


def send_one_call_per_tensor(engine, path: Path) -> None:
    """Update with SGLang's simplest call, once per tensor, as a reference."""
    for name, tensor in state(path).items():
        success, message = engine.update_weights_from_tensor([(name, tensor)], flush_cache=False)
        assert success, message
    assert engine.flush_cache().success


@pytest.mark.parametrize(("client", "bucket_bytes"), [(StockEngine, 1 << 16), (LocalEngine, 1000)])
def test_update_from_other_processes_equals_one_call_per_tensor(
    engine, send, checkpoints, expected, tmp_path, client, bucket_bytes
):
    _, one, two = checkpoints
    send_one_call_per_tensor(engine, two)
    reference = generate(engine)
    wanted = parameters(engine, tmp_path / "reference")
    probe(engine, "scramble", tmp_path)
    stats = send(client(engine), one, two, world_size=2, bucket_bytes=bucket_bytes)
    got = parameters(engine, tmp_path / "bucketed")
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []
    out = generate(engine)
    assert out["output_ids"] == reference["output_ids"] == expected[two] != expected[one]
    assert out["meta_info"]["output_token_logprobs"] == reference["meta_info"]["output_token_logprobs"]
    assert out["meta_info"]["weight_version"] == stats[-1]["weight_version"] == f"{two}#0"
    num_bytes = sum(tensor.nbytes for tensor in state(two).values())
    is_fast = client is LocalEngine
    assert stats[-1]["verified"] == is_fast
    # On the fast path each rank sends its own shards, here half of the bytes.
    assert stats[-1]["num_bytes"] == (num_bytes // 2 if is_fast else num_bytes)
    assert stats[-1]["num_buckets"] > 1


def test_engine_is_updated_over_a_link(engine, send, checkpoints, expected, tmp_path):
    _, one, two = checkpoints
    send_one_call_per_tensor(engine, two)
    wanted = parameters(engine, tmp_path / "reference")
    probe(engine, "scramble", tmp_path)
    stats = send(LocalEngine(engine), one, two, world_size=2, bucket_bytes=1 << 16, link=True)
    got = parameters(engine, tmp_path / "linked")
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []
    out = generate(engine)
    assert (out["output_ids"], out["meta_info"]["weight_version"]) == (expected[two], f"{two}#0")
    assert stats[-1]["verified"]
    assert stats[-1]["sent"] >= stats[-1]["num_bytes"] == sum(t.nbytes for t in state(two).values()) // 2


def test_prefix_cache_is_flushed_by_updates(engine, checkpoints, expected):
    updater = WeightUpdater([LocalEngine(engine)])
    for path in (*checkpoints, *checkpoints):
        updater.update(state(path).items(), path.name)
        assert generate(engine)["output_ids"] == expected[path]
        again = generate(engine)
        assert again["output_ids"] == expected[path]
        assert again["meta_info"]["cached_tokens"] > 0
    updater.close()


def test_update_while_the_event_loop_of_the_engine_runs_in_a_thread(engine, checkpoints, expected):
    thread = threading.Thread(target=engine.loop.run_forever)
    thread.start()
    try:
        updater = WeightUpdater([LocalEngine(engine)])
        updater.update(state(checkpoints[2]).items(), 43)
        request = engine.async_generate(input_ids=[[5, 6, 7]], sampling_params={"max_new_tokens": 1})
        (out,) = asyncio.run_coroutine_threadsafe(request, engine.loop).result(timeout=60)
        assert out["meta_info"]["weight_version"] == "43"
        updater.close()
    finally:
        engine.loop.call_soon_threadsafe(engine.loop.stop)
        thread.join()
    assert generate(engine)["output_ids"] == expected[checkpoints[2]]


def test_readme_example_runs(engine, checkpoints, capsys):
    import transformers

    example = (Path(__file__).parents[2] / "README.md").read_text().split("```python\n")[1].split("```")[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints[2])
    exec(example, {"engine": engine, "model": model})
    num_tensors = len(state(checkpoints[2]))
    assert re.search(rf"^{num_tensors} tensors, \d{{6}} bytes in \d", capsys.readouterr().out, re.MULTILINE)
    out = generate(engine)
    assert out["output_ids"] == greedy(checkpoints[2], torch.bfloat16)
    assert out["meta_info"]["weight_version"] == "1"
