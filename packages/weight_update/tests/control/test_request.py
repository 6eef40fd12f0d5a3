"""Requests: how they reach the loader, and what it does with those that it cannot execute."""

import pickle

import pytest
import torch
from tidemill_weight_update import Request, WeightUpdater
from tidemill_weight_update.control.board import SharedBoard
from tidemill_weight_update.control.descriptor import request_from_json, request_to_json
from tidemill_weight_update.control.mailbox import LOADED, Mailbox
from tidemill_weight_update.sglang import loader, sglang_launch_args
from tidemill_weight_update.sglang.payload import LOADER, request_payload
from toy_engines import ToyEngine, ToyModel, same, tensors


def request(**changes) -> Request:
    fields = {
        "sequence": 7,
        "mailboxes": ("/proc/1/fd/9", "/proc/2/fd/9"),
        "first_receiver": 2,
        "num_receivers": 2,
        "partial": False,
        "timeout_s": 5.0,
    }
    return Request(**fields | changes)


def test_request_survives_json():
    assert request_from_json(request_to_json(request())) == request()


@pytest.mark.parametrize("text", ["", "{}", "[]", "a name", "layers.0.weight", request_to_json(request())[:-1]])
def test_text_that_is_no_request_is_refused(text):
    with pytest.raises(ValueError, match=r"expected a weight update of this version .* install the same version"):
        request_from_json(text)


def test_launch_arguments_add_the_loader():
    assert sglang_launch_args() == {"custom_weight_loader": [LOADER]}
    assert sglang_launch_args(["mine.load"]) == {"custom_weight_loader": ["mine.load", LOADER]}


def test_payload_is_one_name_and_an_empty_tensor():
    ((name, tensor),) = pickle.loads(request_payload(request()))
    assert request_from_json(name) == request()
    assert tensor.numel() == 0


def load(model: torch.nn.Module, text: str) -> None:
    """Call the loader as SGLang does."""
    loader.load(model, [(text, torch.empty(0))])


@pytest.fixture
def mailbox():
    """Mailbox of a trainer that waits for an engine rank in update 3."""
    box = Mailbox(SharedBoard.create())
    box.begin(3)
    yield box
    box.close()


@pytest.fixture
def model(monkeypatch) -> ToyModel:
    """Model of a scheduler; its receiver is made without SGLang."""
    engine = ToyEngine(1)
    monkeypatch.setattr(loader, "_new_receiver", lambda model: engine.receivers[0])
    return engine.models[0]


class Scheduler(ToyEngine):
    """Engine whose loader is called with the text of the request, after `change`."""

    def __init__(self, model: ToyModel, change=lambda text: text) -> None:
        super().__init__(1)
        self._model, self._change = model, change

    def load(self, request, *, flush_cache):
        load(self._model, self._change(request_to_json(request)))


def test_loader_executes_a_request(model):
    updater = WeightUpdater([Scheduler(model)])
    assert updater.update(tensors().items(), 1).verified
    updater.close()
    fresh = ToyModel()
    fresh.load_weights(tensors().items())
    assert same([dict(model.named_parameters())], [dict(fresh.named_parameters())])


def test_refused_request_is_an_error_and_leaves_the_engine_unpaused(model, caplog):
    before = [{name: p.clone() for name, p in model.named_parameters()}]
    engine = Scheduler(model, lambda text: text.replace('"partial"', '"part"'))
    updater = WeightUpdater([engine])
    with pytest.raises(RuntimeError, match=r"its ranks did not report: .* another version of this package"):
        updater.update(tensors().items(), 1)
    assert "install the same version for the trainer and the engine" in caplog.text
    assert engine.paused is None
    assert same([dict(model.named_parameters())], before)
    updater.close()


def test_loader_does_not_raise_if_the_trainer_has_exited(model, caplog):
    load(model, request_to_json(request(mailboxes=("/proc/self/fd/999#1",), first_receiver=0, num_receivers=1)))
    assert "cannot open the trainer's memory /proc/self/fd/999" in caplog.text


def test_exited_trainer_rank_is_reported_to_the_other_ranks(mailbox, model):
    paths = (mailbox.board.path, "/proc/self/fd/999#1")
    load(model, request_to_json(request(sequence=3, mailboxes=paths, first_receiver=0, num_receivers=1)))
    assert 0 < mailbox.state(3, 0) != LOADED
    assert "cannot open the trainer's memory /proc/self/fd/999" in mailbox.reply(0)["error"]
