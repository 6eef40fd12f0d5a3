"""Checkpoints resume bit for bit, refuse what is damaged, and fail on every rank when the disk is full."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, policy_like_loss, shard, weights_of
from tidemill_testing import run_ranks, tiny_model

SCHEDULE = {"lr": 1e-2, "lr_scheduler": "linear", "total_steps": 6, "lr_warmup_steps": 2}


def train(engine, seeds):
    return [
        engine.train_batch(shard(engine, make_batch(9, seed=seed)), policy_like_loss, calculate_entropy=True)
        for seed in seeds
    ]


def run_resume(path, folder):
    engine = build_engine(path, optimizer=SCHEDULE, max_token_len_per_gpu=40)
    train(engine, [0, 1])
    engine.save_checkpoint(folder / "two")
    state = torch.get_rng_state()
    uninterrupted = train(engine, [2, 3]), weights_of(engine)
    engine.close()

    torch.manual_seed(1234)
    engine = build_engine(path, optimizer=SCHEDULE, max_token_len_per_gpu=40)
    train(engine, [5])
    engine.load_checkpoint(folder / "two")
    assert engine.step == 2
    assert torch.equal(torch.get_rng_state(), state)
    resumed = train(engine, [2, 3]), weights_of(engine)
    engine.save_checkpoint(folder / "four")
    engine.close()
    return uninterrupted, resumed


def run_reload(path, folder):
    engine = build_engine(path, optimizer=SCHEDULE)
    engine.load_checkpoint(folder)
    weights = weights_of(engine)
    reference = build_engine(path, optimizer=False)
    reference.load_checkpoint(folder)
    same = all(torch.equal(weights[name], weight) for name, weight in weights_of(reference).items())
    step = engine.step
    reference.close()
    engine.close()
    return weights, step, same


def test_resume_is_bitwise_with_dropout_and_reloads_on_another_world_size(tmp_path):
    path = tiny_model(tmp_path / "model", "llama", vocab_size=VOCAB, attention_dropout=0.2)
    for uninterrupted, resumed in run_ranks(run_resume, 2, path, tmp_path):
        assert resumed[0] == uninterrupted[0]
        assert all(torch.equal(resumed[1][name], weight) for name, weight in uninterrupted[1].items())
    [(weights, step, same)] = run_ranks(run_reload, 1, path, tmp_path / "four")
    assert step == 4
    assert same
    assert all(torch.equal(weights[name], weight) for name, weight in resumed[1].items())


def run_damaged(path, other, folder):
    engine = build_engine(path)
    train(engine, [0])
    good = folder / "good"
    engine.save_checkpoint(good)
    torch.distributed.barrier()
    before = weights_of(engine)
    if engine.get_data_parallel_rank() == 0:
        shutil.copytree(good, folder / "partial")
        (folder / "partial" / "engine.json").unlink()
        shutil.copytree(good, folder / "cut")
        data = next((folder / "cut").glob("__1_*.distcp"))
        data.write_bytes(data.read_bytes()[:100])
        shutil.copytree(good, folder / "newer")
        fields = json.loads((good / "engine.json").read_text())
        (folder / "newer" / "engine.json").write_text(json.dumps(fields | {"format_version": 99}))
    torch.distributed.barrier()
    with pytest.raises(FileNotFoundError, match=r"partial is not a whole checkpoint: it has no engine.json"):
        engine.load_checkpoint(folder / "partial")
    with pytest.raises(ValueError, match="format 99; this version reads 1"):
        engine.load_checkpoint(folder / "newer")
    unlike = build_engine(other)
    with pytest.raises(ValueError, match=r"could not load the checkpoint .*good"):
        unlike.load_checkpoint(good)
    unlike.close()
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(engine).items())
    with pytest.raises(ValueError, match=r"could not load the checkpoint .*cut"):
        engine.load_checkpoint(folder / "cut")
    inference = build_engine(path, optimizer=False)
    inference.save_checkpoint(folder / "weights")
    inference.close()
    with pytest.raises(ValueError, match="saved by an engine without an optimizer"):
        engine.load_checkpoint(folder / "weights")
    engine.load_checkpoint(good)
    engine.close()
    return True


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    other = tiny_model(tmp_path / "other", "qwen3", vocab_size=VOCAB, hidden_size=32)
    assert run_ranks(run_damaged, 2, path, other, tmp_path) == [True, True]


def run_full_disk(path, folder, full_rank):
    engine = build_engine(path)
    rank = engine.get_data_parallel_rank()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    caught = []
    for save in (engine.save_checkpoint, engine.save_hf):
        if rank == full_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            save(folder / f"{save.__name__}-{full_rank}")
            caught.append("")
        except OSError as error:
            caught.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    after = train(engine, [0])
    engine.close()
    return caught, after[0]["loss"]


def test_a_full_disk_is_an_error_on_every_rank(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    for full_rank, writes_hf in ((0, True), (1, False)):
        results = run_ranks(run_full_disk, 2, path, tmp_path, full_rank)
        for (checkpoint, hf), loss in results:
            assert f"save_checkpoint-{full_rank}" in checkpoint
            assert f"rank {full_rank}: " in checkpoint
            assert "MiB are free there" in checkpoint
            assert ("File too large" in hf) is writes_hf
            assert loss > 0
        assert not Path(tmp_path / f"save_checkpoint-{full_rank}" / "engine.json").exists()
