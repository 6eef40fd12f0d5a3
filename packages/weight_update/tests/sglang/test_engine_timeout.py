"""A stopped SGLang engine beside a toy engine that works."""

import os
import signal

import psutil
import pytest
import torch
from safetensors.torch import load_file
from sources import WithEvent
from tidemill_testing import tiny_model
from tidemill_weight_update import WeightUpdater
from tidemill_weight_update.sglang import LocalEngine
from torch import nn
from toy_engines import ToyEngine

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


class MirrorModel(nn.Module):
    """Model with one parameter for each tensor of a checkpoint."""

    def __init__(self, checkpoint: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.places = {name: str(index) for index, name in enumerate(checkpoint)}
        for name, tensor in checkpoint.items():
            self.register_parameter(self.places[name], nn.Parameter(torch.zeros_like(tensor), requires_grad=False))

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.get_parameter(self.places[name]).data.copy_(tensor)

    def holds(self, checkpoint: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(self.get_parameter(self.places[name]), tensor) for name, tensor in checkpoint.items())


def scheduler() -> int:
    """Process id of the engine's scheduler."""
    (pid,) = (p.pid for p in psutil.Process().children(recursive=True) if "sglang::scheduler" in " ".join(p.cmdline()))
    return pid


def generate(engine) -> tuple[list[int], str]:
    sampling = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    out = engine.generate(input_ids=[5, 6, 7, 8, 9], sampling_params=sampling)
    return out["output_ids"], out["meta_info"]["weight_version"]


def test_stopped_engine_is_quarantined_and_updated_alone_later(engine, tmp_path):
    checkpoints = [
        load_file(tiny_model(tmp_path / str(seed), "qwen3", seed=seed, num_hidden_layers=3) / "model.safetensors")
        for seed in range(3)
    ]
    stopped, other = (
        LocalEngine(engine, timeout_s=12.0),
        ToyEngine(1, "other", lambda rank, size: MirrorModel(checkpoints[0])),
    )
    patient = WeightUpdater([stopped, other], bucket_bytes=1 << 16)
    answers = []
    for version, checkpoint in enumerate(checkpoints):
        assert patient.update(checkpoint.items(), version).quarantined == {}
        answers.append(generate(engine)[0])
    patient.close()
    updater = WeightUpdater([stopped, other], bucket_bytes=1 << 16, timeout_s=5.0)
    pid = scheduler()

    try:
        stats = updater.update(WithEvent(checkpoints[0].items(), 8, lambda: os.kill(pid, signal.SIGSTOP)), "stopped")
        assert list(stats.quarantined) == [f"engine 0 of 2 ({stopped!r})"]
        assert other.version == "stopped"
        assert other.models[0].holds(checkpoints[0])
        assert updater.update(checkpoints[1].items(), "without it").quarantined == {}  # it would time out again
    finally:
        os.kill(pid, signal.SIGCONT)
    for version in (1, 2):
        assert updater.readmit([stopped], checkpoints[version].items(), version).quarantined == {}
        assert generate(engine) == (answers[version], str(version))
    assert updater.update(checkpoints[0].items(), "both").quarantined == {}
    assert generate(engine) == (answers[0], "both")
    assert other.models[0].holds(checkpoints[0])
    updater.close()
