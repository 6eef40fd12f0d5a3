"""Writing checkpoints: killed processes, background saving, flushing, full disks."""

import json
import os
import resource
import signal
import sys
import threading

import pytest
import torch
from engine_cases import SCHEDULE, VOCAB, build_engine, train, weights_of
from safetensors.torch import load_file
from tidemill_engines.checkpoint import host_memory
from tidemill_engines.checkpoint.folder import whole_checkpoints
from tidemill_testing import run_ranks, tiny_model


def run_killed(path, folder, backend):
    """Kill rank 0 while it writes its second checkpoint."""
    engine = build_engine(path, backend=backend)
    train(engine, [0])
    engine.save_checkpoint(folder / "one")
    engine.save_hf(folder / "hf")
    train(engine, [1])

    def kill():
        while not any(file.stat().st_size for file in folder.glob(".two.partial/__*")):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "0":
        threading.Thread(target=kill, daemon=True).start()
    engine.save_checkpoint(folder / "two")


def run_after_a_kill(path, folder, backend):
    found = whole_checkpoints(str(folder))
    engine = build_engine(path, backend=backend)
    engine.load_checkpoint(folder / "one")
    weights = weights_of(engine)
    train(engine, [1])
    after = weights_of(engine)
    engine.save_checkpoint(folder / "two")
    engine.load_checkpoint(folder / "two")
    same = all(torch.equal(after[name], weight) for name, weight in weights_of(engine).items())
    engine.close()
    return found, weights, same


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_kill_while_saving_keeps_previous_checkpoint(tmp_path, backend):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=40_000)
    folder = tmp_path / "saved"
    with pytest.raises(RuntimeError, match=r"rank 0 of 2 ended with exit code -9"):
        run_ranks(run_killed, 2, path, folder, backend)
    left = sorted(file.name for file in folder.iterdir())
    assert left == [".two.partial", "hf", "one"]
    expected = load_file(folder / "hf" / "model.safetensors")
    for found, weights, same in run_ranks(run_after_a_kill, 2, path, folder, backend):
        assert found == ["one"]
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
        assert same
    assert sorted(file.name for file in folder.iterdir()) == ["hf", "one", "two"]


def save_and_finish(engine, folder):
    engine.save_checkpoint(folder)
    engine.finish_checkpoint()


def run_in_background(path, folder, background, settings):
    checkpoint = {"asynchronous": background, "keep_last": 2}
    engine = build_engine(path, optimizer=SCHEDULE, checkpoint=checkpoint, **settings)
    for seed in range(4):
        train(engine, [seed])
        # Both contain the current state, even if the next step runs while they are written.
        engine.save_checkpoint(folder / f"step_{seed}", hf_path=folder.parent / f"hf_{background}_{seed}")
        engine.save_hf(folder.parent / f"now_{background}_{seed}")
    train(engine, [9])
    engine.finish_checkpoint()
    assert not engine.is_saving
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
def test_background_checkpoint_is_a_snapshot_and_keep_last_removes_older(tmp_path, settings):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB, tie_word_embeddings=False)
    at_once = run_ranks(run_in_background, 2, path, tmp_path / "at_once", False, settings)
    behind = run_ranks(run_in_background, 2, path, tmp_path / "behind", True, settings)
    for (seen, *weights), (seen_behind, *weights_behind) in zip(at_once, behind, strict=True):
        assert seen == seen_behind == ["step_2", "step_3"]
        for plain, of_background in zip(weights, weights_behind, strict=True):
            assert all(torch.equal(of_background[name], weight) for name, weight in plain.items())
    assert sorted(file.name for file in (tmp_path / "behind").iterdir()) == ["at_the_end", "step_3"]
    for seed in range(4):
        names = f"now_False_{seed}", f"hf_False_{seed}", f"hf_True_{seed}"
        files, *others = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in names)
        assert "model.safetensors" in files
        assert others == [files, files]


def run_inside(path, folder):
    engine = build_engine(path)
    for inside in (folder, folder / "hf"):
        with pytest.raises(ValueError, match=r"hf_path must be outside of the new folder .*new, got .*use a folder"):
            engine.save_checkpoint(folder, hf_path=inside)
    engine.save_checkpoint(folder, hf_path=f"{folder}_hf")
    engine.close()


def test_model_within_the_checkpoint_is_refused_before_it_is_written(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    run_ranks(run_inside, 1, path, tmp_path / "new")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "new", "new_hf"]


def run_without_room(path, folder):
    engine = build_engine(path, checkpoint={"asynchronous": True})
    host_memory._USED_SHARE = 0.0
    engine.save_checkpoint(folder / "one", hf_path=folder / "hf")
    saved = sorted(file.name for file in folder.iterdir()), engine.is_saving
    engine.close()
    return saved


def test_without_host_memory_for_copies_the_save_is_complete_on_return(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    assert run_ranks(run_without_room, 2, path, tmp_path / "saved") == [(["hf", "one"], False)] * 2


def run_phases(path, folder):
    engine = build_engine(path, checkpoint={"keep_last": 2})
    train(engine, [0, 1, 2])
    engine.save_checkpoint(folder / "third")
    engine.save_checkpoint(folder / "third again")
    engine.reset_optimizer(engine.optimizer_config)
    train(engine, [3])
    engine.save_checkpoint(folder / "first")  # of a second phase
    assert whole_checkpoints(str(folder)) == ["third again", "first"]
    with pytest.raises(FileNotFoundError, match=r"the newest complete checkpoint is .*/first"):
        engine.load_checkpoint(folder / "nowhere")
    manifest = folder / "first" / "engine.json"  # with a clock that was ahead
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"saved_ns": 2**62}))
    engine.save_checkpoint(folder / "now")
    engine.close()
    return sorted(kept.name for kept in folder.iterdir())


def test_keep_last_orders_by_time_of_saving(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    assert run_ranks(run_phases, 1, path, tmp_path / "saved") == [["first", "now"]]


def run_to_disk(path, folder, backend):
    """Return the order of fsync, rename and removal while a second checkpoint replaces the first."""
    engine = build_engine(path, backend=backend, checkpoint={"keep_last": 1})
    engine.save_checkpoint(folder / "one")
    happened, sync = [], os.fsync

    def fsync(file):
        descriptor = file if isinstance(file, int) else file.fileno()
        happened.append(("synced", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(file)

    def hear(event, args):
        if event in ("os.rename", "os.remove"):
            happened.append((event, str(args[0])))

    os.fsync = fsync
    sys.addaudithook(hear)
    engine.save_checkpoint(folder / "two")
    engine.close()
    return happened


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_checkpoint_is_flushed_before_older_one_is_removed(tmp_path, backend):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    folder = tmp_path / "saved"
    first, second = run_ranks(run_to_disk, 2, path, folder, backend)
    partial = folder / ".two.partial"
    renamed, removed = (
        first.index((kind, str(name)))
        for kind, name in (("os.rename", partial), ("os.remove", folder / "one" / "engine.json"))
    )
    synced = {name for kind, name in [*first[:renamed], *second] if kind == "synced"}
    files = {str(partial / file.name) for file in (folder / "two").iterdir()}
    assert len(files) >= 4
    assert files | {str(partial)} <= synced
    assert ("synced", str(folder)) in first[renamed:removed]


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
def test_full_disk_is_an_error_on_every_rank(tmp_path, backend):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    for full_rank, writes_hf in ((0, True), (1, False)):
        results = run_ranks(run_full_disk, 2, path, tmp_path, full_rank, backend)
        for rank, ((checkpoint, hf), loss) in enumerate(results):
            assert f"save_checkpoint-{full_rank}" in checkpoint
            assert f"rank {full_rank}: " in checkpoint or rank == full_rank
            assert "Traceback" not in checkpoint
            assert "MiB free" in checkpoint
            assert ("File too large" in hf) is writes_hf
            assert loss > 0
        assert not list(tmp_path.glob(f"*save_checkpoint-{full_rank}*"))
