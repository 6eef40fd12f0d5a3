"""Requests: only those that were signed with the run's token are executed."""

import dataclasses
import json
import os
import pickle

import pytest
import torch
from tidemill_weight_update import Request
from tidemill_weight_update.control.mailbox import LOADED, Mailbox
from tidemill_weight_update.control.request import TOKEN_VARIABLE, TokenError, new_token, run_token, sign, verify
from tidemill_weight_update.sglang import loader, sglang_launch_args
from tidemill_weight_update.sglang.launch import LOADER
from tidemill_weight_update.sglang.payload import request_payload
from toy_engines import ToyEngine, ToyModel, same, tensors

TOKEN, OTHER = new_token(), new_token()


def request(**changes) -> Request:
    fields = {
        "sequence": 7,
        "mailboxes": ("/proc/1/fd/9", "/proc/2/fd/9"),
        "first_receiver": 2,
        "num_receivers": 2,
        "complete": True,
        "partial": False,
        "timeout_s": 5.0,
    }
    return Request(**fields | changes)


@pytest.fixture
def token(monkeypatch) -> str:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    return TOKEN


def test_signed_request_is_verified_unchanged():
    assert verify(sign(request(), TOKEN), TOKEN) == request()
    assert new_token() != new_token()
    assert TOKEN not in sign(request(), TOKEN)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Request)])
def test_each_field_is_signed(field):
    values = {"mailboxes": ["/proc/3/fd/9"], "complete": False, "partial": True}
    mac, _, body = sign(request(), TOKEN).partition(" ")
    changed = json.loads(body) | {field: values.get(field, 99)}
    with pytest.raises(TokenError, match="was not signed with this run's token"):
        verify(f"{mac} {json.dumps(changed, separators=(',', ':'))}", TOKEN)


@pytest.mark.parametrize(
    "text",
    [sign(request(), OTHER), sign(request(), ""), "", " ", "{}", "ä {}", sign(request(), TOKEN)[1:], "a" * 64 + " {}"],
)
def test_request_signed_with_another_token_or_none_is_refused(text):
    with pytest.raises(TokenError, match="was not signed with this run's token"):
        verify(text, TOKEN)


def test_process_without_token_cannot_sign(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(TokenError, match=r"set TIDEMILL_WEIGHT_TOKEN .*sglang_launch_args\(\)"):
        run_token()


def test_launch_arguments_create_one_token_and_keep_it(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "before")
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert sglang_launch_args() == {"custom_weight_loader": [LOADER]}
    made = os.environ[TOKEN_VARIABLE]
    assert len(made) == 64
    assert sglang_launch_args(["mine.load"]) == {"custom_weight_loader": ["mine.load", LOADER]}
    assert os.environ[TOKEN_VARIABLE] == made


def test_payload_is_one_name_and_an_empty_tensor():
    ((name, tensor),) = pickle.loads(request_payload(request(), TOKEN))
    assert verify(name, TOKEN) == request()
    assert tensor.numel() == 0


def load(model: torch.nn.Module, text: str) -> None:
    """Call the loader as SGLang does."""
    loader.load(model, [(text, torch.empty(0))])


@pytest.fixture
def mailbox():
    """Mailbox of a trainer that waits for an engine rank in update 3."""
    box = Mailbox.create()
    box.begin(3)
    yield box
    box.close()


@pytest.fixture
def model(monkeypatch) -> ToyModel:
    """Model of a scheduler; its receiver is made without SGLang."""
    engine = ToyEngine(1)
    monkeypatch.setattr(loader, "_new_receiver", lambda model: engine.receivers[0])
    return engine.models[0]


@pytest.mark.parametrize("key", [OTHER, ""], ids=["another token", "no token"])
def test_loader_refuses_another_token_and_does_not_raise(token, mailbox, model, caplog, key):
    before = [{name: p.clone() for name, p in model.named_parameters()}]
    good = request(sequence=3, mailboxes=(mailbox.path,), first_receiver=0, num_receivers=1, timeout_s=0.1)
    load(model, sign(good, key))
    assert mailbox.state(3, 0) == 0
    assert "was not signed with this run's token" in caplog.text
    load(model, "no request at all")
    assert mailbox.state(3, 0) == 0
    assert same([dict(model.named_parameters())], before)


def test_loader_executes_a_signed_request(token, mailbox, model, monkeypatch):
    """The same kind of request as in the test before, so only the token makes the difference."""
    from tidemill_weight_update import WeightUpdater

    class Scheduler(ToyEngine):
        def load(self, request, *, flush_cache):
            load(model, sign(request, token))

    engine = Scheduler(1)
    updater = WeightUpdater([engine])
    assert updater.update(tensors().items(), 1).verified
    updater.close()
    fresh = ToyModel()
    fresh.load_weights(tensors().items())
    assert same([dict(model.named_parameters())], [dict(fresh.named_parameters())])


def test_loader_does_not_raise_if_the_trainer_has_exited(token, mailbox, model, caplog):
    gone = request(sequence=3, mailboxes=("/proc/self/fd/999",), first_receiver=0, num_receivers=1)
    load(model, sign(gone, token))
    assert "cannot open the trainer's memory /proc/self/fd/999" in caplog.text


def test_exited_trainer_rank_is_reported_to_the_other_ranks(token, mailbox, model):
    good = request(sequence=3, mailboxes=(mailbox.path, "/proc/self/fd/999"), first_receiver=0, num_receivers=1)
    load(model, sign(good, token))
    assert 0 < mailbox.state(3, 0) != LOADED
    assert "cannot open the trainer's memory /proc/self/fd/999" in mailbox.reply(0)["error"]


def test_update_with_another_token_is_an_error_and_leaves_engine_unpaused(monkeypatch, model, caplog):
    from tidemill_weight_update import WeightUpdater

    class Scheduler(ToyEngine):
        def load(self, request, *, flush_cache):
            monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
            load(model, sign(request, OTHER))

    engine = Scheduler(1)
    updater = WeightUpdater([engine])
    with pytest.raises(RuntimeError, match=r"its ranks did not report: .*launched with another TIDEMILL_WEIGHT_TOKEN"):
        updater.update(tensors().items(), 1)
    assert engine.paused is None  # its weights are unchanged
    updater.close()
