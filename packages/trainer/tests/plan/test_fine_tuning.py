"""Plans of `tidemill sft`; tests/sft/test_training.py compares one with a run."""

import json

import pytest
from tidemill_testing.tiny import tiny_model
from tidemill_trainer.cli import main

_LENGTH = 256
_FULLEST = ("forward/backward", "optimizer")


@pytest.fixture
def plan(tmp_path, capsys):
    """Run the command on a tiny model, with a file of one kind of run; return the status, and what was printed."""
    model = f"[model]\npath = '{tiny_model(tmp_path / 'tiny')}'\n[actor]\nnum_workers = 2\n"
    (tmp_path / "sft.toml").write_text(f"{model}[data]\nmax_length = {_LENGTH}\n")
    (tmp_path / "rl.toml").write_text(
        f"{model}[data]\nmax_prompt_length = {_LENGTH // 2}\n[rollout]\nresponse_length = {_LENGTH // 2}\nn = 2\n"
    )

    def run(kind, *args):
        status = main(["plan", str(tmp_path / f"{kind}.toml"), *args])
        return status, capsys.readouterr()

    return run


def _found(printed):
    return json.loads(printed.out)


@pytest.mark.parametrize("engine", [[], ["engine.backend=megatron", "engine.tp=2"], ["engine.optimizer_offload=true"]])
def test_training_worker_has_the_memory_of_one_in_reinforcement_learning(plan, engine):
    sft, rl = (_found(plan(kind, *engine, "--json")[1]) for kind in ("sft", "rl"))
    [device] = sft["devices"]
    same = next(other for other in rl["devices"] if other["name"] == device["name"] == "policy")
    assert device["phases"] == {phase: same["phases"][phase] for phase in _FULLEST}
    assert device["phases"]["forward/backward"]["total"] > 0


@pytest.mark.parametrize("override", ["dpo.beta=0.1", 'data.val_files=["val.jsonl"]'])
def test_validation_and_dpo_have_a_phase_of_log_probs(plan, override):
    [device] = _found(plan("sft", override, "--json")[1])["devices"]
    assert list(device["phases"]) == ["log-probs", *_FULLEST]
    kinds = {part["kind"] for part in device["phases"]["log-probs"]["parts"]}
    assert kinds == {"weights", "optimizer", "gathered", "activations"}


def test_pair_of_dpo_has_two_rows_which_are_sent_twice(plan):
    settings = ["engine.max_token_len_per_gpu=256", "data.train_batch_size=8", "--json"]
    sft, dpo = (_found(plan("sft", *method, *settings)[1]) for method in ([], ["dpo.beta=0.1"]))
    assert sft["step"] == "8 examples of at most 256 tokens, 1 optimizer step"
    assert dpo["step"] == "8 pairs = 16 sequences of at most 256 tokens, 1 optimizer step"
    columns = "columns of the batch to the workers"
    assert sft["bytes_per_step"].pop(columns) == 8 * _LENGTH * (8 + 8 + 4)
    assert dpo["bytes_per_step"].pop(columns) == 16 * _LENGTH * (8 + 8 + 4 + 8 + 8)
    exchanged = sft["bytes_per_step"]
    assert list(exchanged) == ["all-gather per rank and optimizer step", "reduce-scatter per rank and optimizer step"]
    assert dpo["bytes_per_step"] == {name: 2 * number for name, number in exchanged.items()}


def test_what_does_not_fit_is_named_with_its_keys(plan):
    status, printed = plan("sft", "--device-memory=5MiB")
    assert status == 1
    assert "forward/backward requires" in " ".join(printed.err.split())
    assert "lower engine.max_token_len_per_gpu" in " ".join(printed.err.split())
    assert "weights to engines" not in printed.out
    assert max(map(len, printed.out.splitlines())) <= 100
    assert plan("sft", "--device-memory=20GiB")[0] == 0


@pytest.mark.parametrize(
    ("kind", "override", "message"),
    [
        ("sft", "data.max_length=513", "data.max_length must be <= 512, the number of positions of the model, got 513"),
        ("sft", "data.train_batch_size=0", "data.train_batch_size must be >= 1, got 0"),
        ("sft", "data.max_lenght=8", "unknown config key data.max_lenght; did you mean data.max_length?"),
        ("sft", "actor=8", "config key actor must be a table of keys, got 8"),
        ("rl", "trainer=8", "config key trainer must be a table of keys, got 8"),
        (
            "rl",
            "trainer.total_epochs=2",
            "unknown config key trainer.total_epochs; the length of a run is set in steps",
        ),
        ("rl", "rollout.m=8", "unknown config key rollout.m; "),
        ("rl", "actor.ppo_epochs=0", "actor.ppo_epochs must be >= 1, got 0"),
    ],
)
def test_invalid_configuration_is_rejected_with_the_key(plan, kind, override, message):
    status, printed = plan(kind, override)
    assert status == 1
    assert message in " ".join(printed.err.split())
