"""Fused and sharded experts of the training engine are sent to an engine with the names of the checkpoint."""

import threading

import pytest
import torch
from safetensors.torch import load_file
from tidemill_engines import EngineRegistry, FSDP2Config, ModelConfig
from tidemill_testing import run_ranks, tiny_model
from tidemill_weight_update import WeightUpdater
from tidemill_weight_update.receive.receiver import Receiver


class ByName(torch.nn.Module):
    """A model with one parameter per tensor of the checkpoint."""

    def __init__(self, checkpoint):
        super().__init__()
        self.targets = {
            name: torch.nn.Parameter(torch.zeros_like(tensor), False) for name, tensor in checkpoint.items()
        }
        for number, target in enumerate(self.targets.values()):
            self.register_parameter(str(number), target)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.targets[name].data.copy_(tensor)


class Server:
    """An engine with one rank, in a thread of this process."""

    has_loader, tp_size = True, 1

    def __init__(self, checkpoint):
        self.model, self.version = ByName(checkpoint), ""
        self.receiver = Receiver(self.model, 0, 1, lambda name: False, lambda: None)

    def load(self, request, *, flush_cache):
        thread = threading.Thread(target=self.receiver.handle, args=(request,))
        thread.start()
        thread.join()

    def pause(self, mode):
        pass

    def resume(self):
        pass

    def set_weight_version(self, version):
        self.version = version

    def get_weight_version(self):
        return self.version


def run_updates(path, checkpoint):
    for number, settings in enumerate([{}, {"fsdp_size": 1}, {"param_offload": True}]):
        engine = EngineRegistry.new(
            model_type="language_model",
            backend="fsdp2",
            model=ModelConfig(path=str(path)),
            engine=FSDP2Config(device="cpu", **settings),
        )
        engine.initialize()
        servers = [Server(checkpoint)] if engine.get_data_parallel_rank() == 0 else []
        updater = WeightUpdater(servers, bucket_bytes=20_000)
        assert engine.streams_weights is settings.get("param_offload", False)
        for version in (1, 2):
            shards = engine.get_per_tensor_shards()
            stats = updater.update(shards if engine.streams_weights else list(shards), version)
            assert stats.verified
            assert not stats.quarantined
            for server in servers:
                assert server.version == str(version)
                for name, tensor in checkpoint.items():
                    assert torch.equal(server.model.targets[name], tensor), (number, name)
                    server.model.targets[name].zero_()
        updater.close()
        engine.close()
    return True


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_engine_receives_fused_experts_with_checkpoint_names(tmp_path, world_size):
    path = tiny_model(tmp_path / "model", "qwen3_moe", vocab_size=61)
    checkpoint = load_file(path / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in checkpoint
    assert run_ranks(run_updates, world_size, path, checkpoint) == [True] * world_size
