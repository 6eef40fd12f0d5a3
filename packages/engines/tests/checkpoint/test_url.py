"""Checkpoints in an S3 store."""

import tempfile
from pathlib import Path

import fsspec
import pytest
import torch
from engine_cases import SCHEDULE, VOCAB, build_engine, train, weights_of
from safetensors.torch import load
from tidemill_engines.checkpoint.folder import whole_checkpoints
from tidemill_testing import run_ranks, tiny_model
from tidemill_testing.s3 import s3_bucket


@pytest.fixture(scope="module")
def bucket():
    with s3_bucket() as url:
        yield url


@pytest.fixture
def store(bucket):
    return fsspec.url_to_fs(bucket, use_listings_cache=False, skip_instance_cache=True)[0]


def _temporary():
    return [path for path in Path(tempfile.gettempdir()).iterdir() if path.name.startswith("tidemill-checkpoint-")]


def save_and_finish(engine, url):
    engine.save_checkpoint(url)
    engine.finish_checkpoint()


def run_save(path, url, backend):
    engine = build_engine(path, backend=backend, optimizer=SCHEDULE, checkpoint={"asynchronous": True, "keep_last": 2})
    for seed in range(3):
        train(engine, [seed])
        engine.save_checkpoint(f"{url}/step_{seed}", hf_path=f"{url}/hf/{seed}/")
    weights = weights_of(engine)
    went_on = train(engine, [3])
    with pytest.raises(OSError, match=r"s3://tests/\w+/step_2 exists already"):
        save_and_finish(engine, f"{url}/step_2")
    engine.close()
    return weights, went_on


def run_load(path, url, backend):
    engine = build_engine(path, backend=backend, optimizer=SCHEDULE)
    engine.load_checkpoint(f"{url}/step_2/")
    weights = weights_of(engine)
    went_on = train(engine, [3])
    engine.close()
    return weights, went_on


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_checkpoint_at_a_url_resumes_bitwise_and_on_another_number_of_ranks(tmp_path, bucket, store, backend):
    path, url = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB), f"{bucket}/{backend}"
    saved = run_ranks(run_save, 2, path, url, backend)
    assert whole_checkpoints(url) == ["step_1", "step_2"]
    assert not store.exists(f"{url}/step_0")  # keep_last=2
    assert store.find(f"{url}/step_1")
    for (weights, went_on), (loaded, resumed) in zip(saved, run_ranks(run_load, 2, path, url, backend), strict=True):
        assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
        assert resumed == went_on
    [(loaded, _)] = run_ranks(run_load, 1, path, url, backend)
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    exported = load(store.cat_file(f"{url}/hf/2/model.safetensors"))
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
    assert store.exists(f"{url}/hf/2/config.json")
    assert not _temporary()


def run_refused(path, other, url):
    foreign = build_engine(other)
    with pytest.raises(ValueError, match=f"could not load the checkpoint {url}/good: "):  # not its temporary folder
        foreign.load_checkpoint(f"{url}/good")
    foreign.close()
    engine = build_engine(path)
    before = weights_of(engine)
    messages = []
    for name in ("cut", "flipped", "partial", "nowhere"):
        with pytest.raises((FileNotFoundError, ValueError)) as caught:
            engine.load_checkpoint(f"{url}/{name}")
        messages.append(str(caught.value))
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(engine).items())
    engine.close()
    return messages


def run_good(path, url):
    engine = build_engine(path)
    engine.save_checkpoint(f"{url}/good")
    engine.close()


def test_damaged_checkpoint_at_a_url_is_refused(tmp_path, bucket, store):
    path, url = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB), f"{bucket}/damaged"
    run_ranks(run_good, 2, path, url)
    for name in ("cut", "flipped", "partial"):
        store.copy(f"{url}/good", f"{url}/{name}", recursive=True)
    for name, change in (("cut", lambda data: data[:100]), ("flipped", lambda data: data[:-9] + b"\xff" + data[-8:])):
        file = next(file for file in store.find(f"{url}/{name}") if "/__0_" in file)
        store.pipe_file(file, change(store.cat_file(file)))
    store.rm_file(f"{url}/partial/engine.json")
    other = tiny_model(tmp_path / "other", "qwen3", vocab_size=VOCAB, hidden_size=32)
    for cut, flipped, partial, nowhere in run_ranks(run_refused, 2, path, other, url):
        assert "/damaged/cut/__0_" in cut
        assert "bytes, found 100; the newest complete checkpoint is s3://tests/damaged/good" in cut
        assert "is damaged: its contents have changed; the newest complete checkpoint is s3://tests/damaged/" in flipped
        assert "s3://tests/damaged/partial is not a complete checkpoint: it lacks engine.json" in partial
        assert "s3://tests/damaged/nowhere is not a complete checkpoint" in nowhere
    assert not _temporary()


def run_unreachable(path, url):
    engine = build_engine(path)
    messages = []
    for location in (f"{url}-of-nobody/one", "gs://tests/one", "nowhere://tests/one"):
        with pytest.raises(OSError, match="could not") as caught:
            engine.save_checkpoint(location)
        messages.append(str(caught.value))
    if engine.get_data_parallel_rank() == 1:
        tempfile.tempdir = "/nowhere"
    with pytest.raises(OSError, match="/nowhere/tidemill-checkpoint-"):  # on both ranks
        engine.save_checkpoint(f"{url}/one")
    assert train(engine, [0])[0]["loss"] > 0
    engine.close()
    return messages


def test_bucket_that_cannot_be_written_is_an_error_on_every_rank(tmp_path, bucket):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    for messages in run_ranks(run_unreachable, 2, path, bucket):
        assert messages[0] == (
            "could not write to s3://tests-of-nobody/one: FileNotFoundError: The specified bucket does not exist"
        )
        assert (
            messages[1] == "could not read gs://tests/one: ImportError: Please install gcsfs to access Google Storage"
        )
        assert messages[2] == "could not read nowhere://tests/one: ValueError: Protocol not known: nowhere"
