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


def damage(folder: Path) -> None:
    """Copies of the checkpoint `folder/good`, each damaged in another way."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder / "good", folder / name))

    (copy("partial") / "engine.json").unlink()
    next(copy("lacks").glob("__1_*.distcp")).unlink()
    cut = next(copy("cut").glob("__1_*.distcp"))
    cut.write_bytes(cut.read_bytes()[:100])
    flipped = next(copy("flipped").glob("__0_*.distcp"))
    contents = bytearray(flipped.read_bytes())
    contents[len(contents) // 2] ^= 1
    flipped.write_bytes(contents)
    manifest = copy("newer") / "engine.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format_version": 99}))
    (copy("garbled") / "engine.json").write_text("{")


REFUSED = {
    "partial": (FileNotFoundError, r"partial is not a whole checkpoint: it has no engine.json; .*whole.* is .*good"),
    "lacks": (FileNotFoundError, r"lacks is not a whole checkpoint: it lacks __1_.*; the newest whole .*good"),
    "cut": (ValueError, r"cut/__1_.* is damaged: it has 100 bytes, \d+ were written; the newest whole .*good"),
    "flipped": (ValueError, r"flipped/__0_.* is damaged: its contents have changed; the newest whole .*good"),
    "newer": (ValueError, "format 99; this version reads 2"),
    "garbled": (ValueError, r"garbled/engine.json is damaged: .*; the newest whole .*good"),
    "nowhere": (FileNotFoundError, "nowhere is not a whole checkpoint"),
}


def run_damaged(path, other, folder):
    engine = build_engine(path)
    train(engine, [0])
    engine.save_checkpoint(folder / "good")
    before, step = weights_of(engine), engine.step
    if engine.get_data_parallel_rank() == 0:
        damage(folder)
    torch.distributed.barrier()
    train(engine, [1])
    after = weights_of(engine)
    for name, (kind, message) in REFUSED.items():
        with pytest.raises(kind, match=message):
            engine.load_checkpoint(folder / name)
    unlike = build_engine(other)
    with pytest.raises(ValueError, match=r"could not load the checkpoint .*good"):
        unlike.load_checkpoint(folder / "good")
    unlike.close()
    inference = build_engine(path, optimizer=False)
    inference.save_checkpoint(folder / "weights")
    inference.close()
    with pytest.raises(ValueError, match="saved by an engine without an optimizer"):
        engine.load_checkpoint(folder / "weights")
    with pytest.raises(OSError, match=r"good exists already"):
        engine.save_checkpoint(folder / "good")
    assert all(torch.equal(after[name], weight) for name, weight in weights_of(engine).items())
    engine.load_checkpoint(folder / "good")
    assert engine.step == step
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(engine).items())
    engine.close()
    return True


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    other = tiny_model(tmp_path / "other", "qwen3", vocab_size=VOCAB, hidden_size=32)
    assert run_ranks(run_damaged, 2, path, other, tmp_path / "saved") == [True, True]


def save_and_finish(engine, folder):
    engine.save_checkpoint(folder)
    engine.finish_checkpoint()


def run_in_background(path, folder, background, settings):
    checkpoint = {"asynchronous": background, "keep_last": 2}
    engine = build_engine(path, optimizer=SCHEDULE, checkpoint=checkpoint, **settings)
    for seed in range(4):
        train(engine, [seed])
        engine.save_checkpoint(folder / f"step_{seed}")
        # What is saved is the state of now, whatever the next step does while it is being written.
    train(engine, [9])
    engine.finish_checkpoint()
    torch.distributed.barrier()
    seen = sorted(file.name for file in folder.iterdir())
    engine.load_checkpoint(folder / "step_3")
    weights = weights_of(engine)
    train(engine, [5])
    after = weights_of(engine)
    with pytest.raises(OSError, match="step_3 exists already"):
        save_and_finish(engine, folder / "step_3")
    engine.save_checkpoint(folder / "at_the_end")
    engine.close()
    return seen, weights, after


@pytest.mark.parametrize("settings", [{}, {"backend": "megatron", "pipeline_model_parallel_size": 2}], ids=str)
def test_a_checkpoint_in_the_background_is_that_of_its_moment_and_only_the_last_are_kept(tmp_path, settings):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB, tie_word_embeddings=False)
    at_once = run_ranks(run_in_background, 2, path, tmp_path / "at_once", False, settings)
    behind = run_ranks(run_in_background, 2, path, tmp_path / "behind", True, settings)
    for (seen, *weights), (seen_behind, *weights_behind) in zip(at_once, behind, strict=True):
        assert seen == seen_behind == ["step_2", "step_3"]
        for plain, of_background in zip(weights, weights_behind, strict=True):
            assert all(torch.equal(of_background[name], weight) for name, weight in plain.items())
    assert sorted(file.name for file in (tmp_path / "behind").iterdir()) == ["at_the_end", "step_3"]


LAYOUTS = [{}, {"fsdp_size": 1}, {"fsdp_size": 2, "reshard_after_forward": False}, {"param_offload": True}]


def run_save_layouts(path, folder):
    for number, layout in enumerate(LAYOUTS):
        engine = build_engine(path, optimizer=SCHEDULE, **layout)
        train(engine, [0, 1])
        engine.save_checkpoint(folder / str(number))
        weights = weights_of(engine)
        engine.close()
    return weights


def run_load_layouts(path, folder):
    """Loads every layout's checkpoint into another layout, trains on, and returns what came of it."""
    out = []
    for number in range(len(LAYOUTS)):
        engine = build_engine(path, optimizer=SCHEDULE, **({} if number % 2 else {"fsdp_size": 1}))
        engine.load_checkpoint(folder / str(number))
        loaded = weights_of(engine)
        history = train(engine, [2, 3])
        out.append((loaded, history, weights_of(engine), engine.step))
        engine.close()
    return out


def run_straight(path):
    engine = build_engine(path, optimizer=SCHEDULE)
    train(engine, [0, 1])
    history = train(engine, [2, 3])
    weights = weights_of(engine)
    engine.close()
    return history, weights


def test_four_ranks_reload_on_two_and_go_on_as_if_nothing_had_been(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB, tie_word_embeddings=True)
    saved = run_ranks(run_save_layouts, 4, path, tmp_path / "saved")
    history, weights = run_ranks(run_straight, 2, path)[0]
    for of_rank in run_ranks(run_load_layouts, 2, path, tmp_path / "saved"):
        for _, resumed, after, step in of_rank:
            assert step == 4
            for actual, expected in zip(resumed, history, strict=True):
                assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6)
            for name, weight in weights.items():
                torch.testing.assert_close(after[name], weight, rtol=1e-3, atol=1e-5)
        last = of_rank[-1][0]  # bit for bit what four ranks held
        assert all(torch.equal(last[name], weight) for name, weight in saved[0].items())


def run_full_disk(path, folder, full_rank, backend):
    engine = build_engine(path, backend=backend)
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


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_a_full_disk_is_an_error_on_every_rank(tmp_path, backend):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    for full_rank, writes_hf in ((0, True), (1, False)):
        results = run_ranks(run_full_disk, 2, path, tmp_path, full_rank, backend)
        for rank, ((checkpoint, hf), loss) in enumerate(results):
            assert f"save_checkpoint-{full_rank}" in checkpoint
            assert f"rank {full_rank}: " in checkpoint or rank == full_rank
            assert "Traceback" not in checkpoint
            assert "MiB are free there" in checkpoint
            assert ("File too large" in hf) is writes_hf
            assert loss > 0
        assert not list(tmp_path.glob(f"*save_checkpoint-{full_rank}*"))
