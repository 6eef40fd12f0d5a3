"""Checkpoints resume bitwise and in other layouts; damaged or foreign ones are rejected."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from engine_cases import SCHEDULE, VOCAB, build_engine, train, weights_of
from tidemill_engines.checkpoint.folder import Progress
from tidemill_engines.fsdp2.checkpoint import load, rng_state
from tidemill_engines.fsdp2.checkpoint import save as save_tensors
from tidemill_testing import run_ranks, tiny_model


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
    """Create damaged copies of the checkpoint `folder/good`."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder / "good", folder / name))

    (copy("partial") / "engine.json").unlink()
    next(copy("lacks").glob("__1_*.distcp")).unlink()
    cut = next(copy("cut").glob("__0_*.distcp"))
    cut.write_bytes(cut.read_bytes()[:100])
    flipped = next(copy("flipped").glob("__0_*.distcp"))
    contents = bytearray(flipped.read_bytes())
    contents[len(contents) // 2] ^= 1
    flipped.write_bytes(contents)
    manifest = copy("newer") / "engine.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format_version": 99}))
    (copy("garbled") / "engine.json").write_text("{")


REFUSED = {
    "partial": (
        FileNotFoundError,
        r"partial is not a complete checkpoint: it lacks engine.json; .* is .*good",
    ),
    "lacks": (FileNotFoundError, r"lacks is not a complete checkpoint: it lacks __1_.*; the newest complete .*good"),
    "cut": (ValueError, r"cut/__0_.* is damaged: expected \d+ bytes, found 100; the newest complete .*good"),
    "flipped": (ValueError, r"flipped/__0_.* is damaged: its contents have changed; the newest complete .*good"),
    "newer": (ValueError, "format 99; this version supports 2"),
    "garbled": (ValueError, r"garbled/engine.json is damaged: .*; the newest complete .*good"),
    "nowhere": (FileNotFoundError, "nowhere is not a complete checkpoint"),
}


NOT_DISTRIBUTED = {"use_distributed_optimizer": False}
UNLIKE = {  # engines that do not match `good`: model, layout, and the error
    "fsdp2": [
        ({"hidden_size": 32}, {}, "rank 0: ValueError"),
        ({"num_hidden_layers": 1}, {}, r"of another model, which also has model\.layers\.1\."),
    ],
    "megatron": [
        ({"hidden_size": 32}, {}, r"of another model, whose .* has the shape \(61, 64\) instead of \(61, 32\)"),
        ({"vocab_size": VOCAB + 3}, {}, "of another model, whose vocabulary has 61 tokens instead of 64"),
        ({"tie_word_embeddings": True}, NOT_DISTRIBUTED, "of another model, which also has output_layer.weight"),
    ],
}


def run_foreign(paths, folder, backend):
    """Engines of other models reject the checkpoints of `run_damaged` and continue unchanged."""
    for number, (path, (_, settings, message)) in enumerate(zip(paths, UNLIKE[backend], strict=True)):
        engine = build_engine(path, backend=backend, **settings)
        train(engine, [0])
        engine.save_checkpoint(folder / f"own {number}")
        before, step = weights_of(engine), engine.step
        with pytest.raises(ValueError, match=rf"could not load the checkpoint .*good: .*{message}") as caught:
            engine.load_checkpoint(folder / "good")
        assert "Traceback" not in str(caught.value)
        assert engine.step == step
        assert all(torch.equal(before[name], weight) for name, weight in weights_of(engine).items())
        went_on = train(engine, [1]), weights_of(engine)
        engine.load_checkpoint(folder / f"own {number}")
        assert train(engine, [1]) == went_on[0]
        assert all(torch.equal(went_on[1][name], weight) for name, weight in weights_of(engine).items())
        engine.close()


def run_damaged(path, others, folder, backend):
    inference = build_engine(path, backend=backend, optimizer=False)
    inference.save_checkpoint(folder / "weights")
    inference.close()
    engine = build_engine(path, backend=backend)
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
    with pytest.raises(ValueError, match="saved by an engine without an optimizer"):
        engine.load_checkpoint(folder / "weights")
    with pytest.raises(OSError, match=r"good exists already"):
        engine.save_checkpoint(folder / "good")
    assert all(torch.equal(after[name], weight) for name, weight in weights_of(engine).items())
    engine.load_checkpoint(folder / "good")
    assert engine.step == step
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(engine).items())
    engine.close()
    run_foreign(others, folder, backend)
    return True


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_damaged_and_foreign_checkpoints_are_rejected(tmp_path, backend):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    others = [
        tiny_model(tmp_path / f"other {number}", "qwen3", **({"vocab_size": VOCAB} | fields))
        for number, (fields, *_) in enumerate(UNLIKE[backend])
    ]
    assert run_ranks(run_damaged, 2, path, others, tmp_path / "saved", backend) == [True, True]


KINDS = [  # engines in sequence, and the error of each for the checkpoint of the previous one
    ("fsdp2", {}, ""),
    ("megatron", NOT_DISTRIBUTED, r"it is a checkpoint of another model or backend, without \w+"),
    ("megatron", {}, r"its optimizer has no state\.param\..* saved with another .*use_distributed_optimizer"),
    ("fsdp2", {}, "rank 0: "),
]


def run_kinds(path, folder):
    for number, (backend, settings, message) in enumerate(KINDS):
        engine = build_engine(path, backend=backend, **settings)
        train(engine, [0])
        before = weights_of(engine)
        if number:
            with pytest.raises(ValueError, match=f"could not load the checkpoint .*{number - 1}: {message}"):
                engine.load_checkpoint(folder / str(number - 1))
        assert all(torch.equal(before[name], weight) for name, weight in weights_of(engine).items())
        engine.save_checkpoint(folder / str(number))
        engine.close()
    return True


@pytest.mark.slow
def test_checkpoint_of_another_engine_is_rejected(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    assert run_ranks(run_kinds, 1, path, tmp_path / "saved") == [True]


def run_if_saved(folder):
    group = torch.distributed.group.WORLD
    progress = Progress(step=0, skipped_steps=0, world_size=1, has_optimizer=False)
    states = rng_state(torch.device("cpu"))
    saved = {"weight": torch.arange(3.0)} | {f"rng.0.{name}": state for name, state in states.items()}
    save_tensors(str(folder), saved, progress, group, keep_last=None)
    weight, state, of_gpu = torch.zeros(3), torch.zeros_like(states["cpu"]), torch.ones(16, dtype=torch.uint8)
    wanted = {"rng.0.cpu": state, "rng.0.cuda": of_gpu}
    found = load(folder, {"weight": weight}, group, if_saved=wanted)
    with pytest.raises(ValueError, match="could not load the checkpoint"):
        load(folder, {"weight": weight} | wanted, group, if_saved={})
    return list(found), weight.tolist(), torch.equal(state, states["cpu"]), bool(of_gpu.all())


def test_random_state_of_unsaved_device_is_unchanged(tmp_path):
    assert run_ranks(run_if_saved, 1, tmp_path / "saved") == [(["rng.0.cpu"], [0.0, 1.0, 2.0], True, True)]


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
    """Load every layout's checkpoint into another layout, continue training, and return the results."""
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


def test_four_rank_checkpoint_resumes_on_two_ranks(tmp_path):
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
        last = of_rank[-1][0]  # bitwise the state of four ranks
        assert all(torch.equal(last[name], weight) for name, weight in saved[0].items())
