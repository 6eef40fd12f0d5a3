"""Runs of `tidemill sft` with real Ray actors and engines."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tidemill_trainer import run
from tidemill_trainer.cli import main
from tidemill_trainer.demo.chat import chat_tokenizer
from tidemill_trainer.demo.shop import PIECES, conversation_rows
from tidemill_trainer.sft.config import SFTDataConfig
from tidemill_trainer.sft.dataset import Encoder
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.usefixtures("ray_cluster")]

TRAIN, VAL = conversation_rows(num_train=9, num_val=5, seed=1)
PREFERENCES = [
    {"prompt": "ab", "chosen": "cd", "rejected": "efg"},
    {"prompt": "a", "chosen": "xyz", "rejected": "b"},
    {"prompt": "abcde", "chosen": "q", "rejected": "rs"},
]


@pytest.fixture
def train(chat_assets, tmp_path, write):
    """`train(name, "key=value", ...)`: run `tidemill sft` and return the folder of the run."""

    def make(name, *overrides, resume=False):
        config = Path(__file__).parents[4] / "recipes" / "demo_sft.toml"
        folder = [f"trainer.run_dir={tmp_path}", f"trainer.name={name}"]
        assert run.sft(config, [*chat_assets, *folder, *overrides], resume=resume) == 0
        return tmp_path / name

    return make


def data(write, train, val):
    return [f'data.train_files=["{write("train", train)}"]', f'data.val_files=["{write("val", val)}"]']


def metrics_of(folder):
    """Return the metrics by step, without those that measure time and memory."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(("timing_s/", "perf/"))} for row in rows]


def export(folder, step):
    return folder / "checkpoints" / f"step_{step:06d}" / "huggingface"


def log_probs(model, example):
    """Return the log-probs, float64, of the trained tokens of an example."""
    ids = torch.tensor([example.token_ids])
    of_tokens = F.log_softmax(model(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
    return of_tokens[example.num_prompt_tokens - 1 :][torch.tensor(example.response_mask).bool()]


def examples_of(rows, method):
    encoder = Encoder(chat_tokenizer(PIECES), SFTDataConfig())
    return [getattr(encoder, method)(row) for row in rows]


def load_model(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def check_resumed(train, whole, settings, *, num_steps):
    """Check that a copy of a run that continues after step 1 has the metrics and the weights of the whole run."""
    resumed = whole.parent / "resumed"
    shutil.copytree(whole, resumed)
    for step in range(2, num_steps + 1):
        shutil.rmtree(resumed / "checkpoints" / f"step_{step:06d}")
    train("resumed", *settings, resume=True)
    assert metrics_of(resumed) == metrics_of(whole)
    weights, expected = (load_file(export(folder, num_steps) / "model.safetensors") for folder in (resumed, whole))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_resumed_run_equals_an_uninterrupted_one(train, write, capsys):
    """The last batch has one example, fewer than there are ranks."""
    settings = [*data(write, TRAIN, VAL), "data.train_batch_size=4", "trainer.total_epochs=1", "trainer.save_freq=1"]
    settings += ["trainer.max_ckpt_to_keep=3", "trainer.test_freq=2"]
    whole = train("whole", *settings)
    metrics = metrics_of(whole)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert [row.get("train/epoch") for row in metrics] == [None, 4 / 9, 8 / 9, 1.0]
    assert ["val/loss" in row for row in metrics] == [True, False, True, True]
    assert metrics[3]["val/loss"] < metrics[0]["val/loss"]
    assert not list((whole / "logs").glob("rollout*"))  # no SGLang process

    check_resumed(train, whole, settings, num_steps=3)
    assert "continuing after step 1" in capsys.readouterr().out
    with torch.no_grad():
        model = load_model(export(whole, 3))
        of_rows = torch.cat([log_probs(model, example) for [example] in examples_of(VAL, "example")])
    assert metrics[3]["val/loss"] == pytest.approx(-of_rows.mean().item(), rel=1e-5)


def test_run_with_more_epochs_on_resume_equals_one_that_had_them_before(train, write, capsys):
    settings = [
        *data(write, PREFERENCES, PREFERENCES),
        "dpo.beta=0.3",
        "data.train_batch_size=3",
        "trainer.test_freq=1",
        "actor.num_workers=1",
    ]
    short, whole = (train(name, *settings, f"trainer.total_epochs={n}") for name, n in (("short", 1), ("whole", 2)))
    assert [len(metrics_of(folder)) for folder in (short, whole)] == [2, 3]
    train("short", *settings, "trainer.total_epochs=2", resume=True)
    shown = capsys.readouterr().out
    assert "continuing after step 1" in shown
    assert "left out" not in shown
    assert metrics_of(short) == metrics_of(whole)
    weights, expected = (load_file(export(folder, 2) / "model.safetensors") for folder in (short, whole))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_more_epochs_after_a_smaller_last_batch_are_warned_about(train, write, capsys):
    settings = [*data(write, TRAIN[:5], VAL), "data.train_batch_size=4", "actor.num_workers=1"]
    folder = train("run", *settings, "trainer.total_epochs=1")
    capsys.readouterr()
    warning = "step 2 had a smaller batch, because the run ended there after epoch 1"
    for epochs, warns in ((1, False), (2, True)):
        train("run", *settings, f"trainer.total_epochs={epochs}", resume=True)
        assert (warning in " ".join(capsys.readouterr().out.split())) is warns
    assert [row.get("train/epoch") for row in metrics_of(folder)] == [None, 4 / 5, 1.0, 2.0]


def test_run_with_checkpoints_at_a_url_resumes(train, write, tmp_path, capsys):
    url = f"file://{tmp_path}/elsewhere"
    settings = [*data(write, TRAIN, VAL), "data.train_batch_size=4", "trainer.total_epochs=1", "trainer.save_freq=1"]
    settings += [f"trainer.checkpoint_dir={url}", "actor.num_workers=1"]
    whole = train("whole", *settings)
    saved = tmp_path / "elsewhere" / "whole"
    assert sorted(path.name for path in saved.iterdir()) == ["run_id", "step_000002", "step_000003"]
    assert not (whole / "checkpoints").exists()
    expected, metrics = load_file(saved / "step_000003" / "huggingface" / "model.safetensors"), metrics_of(whole)
    (saved / "step_000003" / "trainer.json").unlink()
    train("whole", *settings, resume=True)
    assert f"continuing after step 2 from {url}/whole/step_000002" in capsys.readouterr().out.replace("\n", "")
    assert metrics_of(whole) == metrics
    weights = load_file(saved / "step_000003" / "huggingface" / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_plan_has_the_weights_and_the_optimizer_state_of_a_run(train, write, capsys):
    """A checkpoint has the states of both ranks."""
    folder = train("run", *data(write, TRAIN, VAL), "data.train_batch_size=9", "trainer.total_epochs=1")
    capsys.readouterr()
    assert main(["plan", str(folder / "config.toml"), "--json"]) == 0
    [device] = json.loads(capsys.readouterr().out)["devices"]
    planned = {part["kind"]: 2 * part["bytes"] for part in device["phases"]["optimizer"]["parts"]}
    engine = folder / "checkpoints" / "step_000001" / "engine"
    saved = {"model": 0, "optimizer": 0}
    for name, tensor in FileSystemReader(engine).read_metadata().state_dict_metadata.items():
        if name.partition(".")[0] in saved and tensor.size:  # step counts are scalars
            saved[name.partition(".")[0]] += tensor.size.numel() * tensor.properties.dtype.itemsize
    assert saved == {"model": planned["weights"], "optimizer": planned["optimizer"]}
    assert planned["gradients"] == planned["weights"] > 0


def test_megatron_trains_and_validates_as_transformers_computes(train, write):
    megatron = ["engine.backend=megatron", "engine.tp=2", "engine.max_token_len_per_gpu=128"]
    folder = train("megatron", *data(write, TRAIN, VAL), *megatron, "data.train_batch_size=9", "trainer.total_epochs=2")
    first, *_, last = metrics_of(folder)
    assert last["val/loss"] < first["val/loss"]
    with torch.no_grad():
        model = load_model(export(folder, 2))
        of_rows = torch.cat([log_probs(model, example) for [example] in examples_of(VAL, "example")])
    assert last["val/loss"] == pytest.approx(-of_rows.mean().item(), rel=1e-5)


def dpo_loss(model, reference, pairs, beta, smoothing):
    """Equation 7 of arXiv:2305.18290, with the label smoothing of conservative DPO, in float64."""
    losses = []
    for chosen, rejected in pairs:
        ratios = [log_probs(model, row).sum() - log_probs(reference, row).sum().detach() for row in (chosen, rejected)]
        margin = beta * (ratios[0] - ratios[1])
        losses.append(-(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin))
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    "layout",
    [
        ["actor.num_workers=1"],
        ["actor.num_workers=2", "engine.micro_batch_size_per_gpu=1"],
        ["actor.num_workers=2", "engine.backend=megatron", "engine.tp=2", "engine.max_token_len_per_gpu=128"],
    ],
)
def test_loss_and_gradient_of_dpo_do_not_depend_on_ranks_and_micro_batches(train, write, chat_assets, layout):
    """Adam with a large epsilon is plain gradient descent, so two exports give the gradient."""
    files, method = data(write, PREFERENCES, PREFERENCES), ["dpo.beta=0.3", "dpo.label_smoothing=0.1"]
    descent = ["optimizer.eps=1e3", "optimizer.lr=2e2", "optimizer.betas=[0.0,0.0]", "optimizer.clip_grad=inf"]
    length = ["data.train_batch_size=3", "trainer.total_epochs=2", "trainer.save_freq=1", "trainer.test_freq=1"]
    folder = train("dpo", *files, *method, *descent, *length, *layout)
    initial = chat_assets[0].removeprefix("model.path=")
    model, reference = load_model(export(folder, 1)), load_model(initial)
    loss = dpo_loss(model, reference, examples_of(PREFERENCES, "pair"), beta=0.3, smoothing=0.1)
    loss.backward()
    metrics = metrics_of(folder)
    assert metrics[1]["train/loss"] == pytest.approx(0.6931472, rel=1e-6)  # policy and reference are equal
    assert metrics[2]["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics[1]["val/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics[1]["val/rewards/margins"] > 0.01
    assert metrics[2]["train/rewards/margins"] == pytest.approx(metrics[1]["val/rewards/margins"], rel=1e-12)
    before, after = (load_file(export(folder, step) / "model.safetensors") for step in (1, 2))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = torch.cat([(before[name] - after[name]).double().flatten() / 0.2 for name in before])
    expected = torch.cat([gradients[name].flatten() for name in before])
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_resumed_dpo_equals_an_uninterrupted_one_with_lora(train, write, chat_assets):
    """The reference is the initial model, also of the resumed run, and the adapter is merged into the export."""
    settings = [*data(write, PREFERENCES, PREFERENCES), "dpo.beta=0.3", "model.lora.rank=4", "optimizer.lr=1e-2"]
    settings += ["data.train_batch_size=3", "trainer.total_epochs=3", "trainer.save_freq=1", "trainer.test_freq=1"]
    settings += ["trainer.max_ckpt_to_keep=3"]
    whole = train("whole", *settings)
    metrics = metrics_of(whole)
    assert metrics[1]["train/loss"] == pytest.approx(0.6931472, rel=1e-6)
    assert metrics[3]["val/loss"] < 0.69
    with torch.no_grad():
        model, reference = load_model(export(whole, 3)), load_model(chat_assets[0].removeprefix("model.path="))
        loss = dpo_loss(model, reference, examples_of(PREFERENCES, "pair"), beta=0.3, smoothing=0.0)
    assert metrics[3]["val/loss"] == pytest.approx(loss.item(), rel=1e-4)
    check_resumed(train, whole, settings, num_steps=3)
