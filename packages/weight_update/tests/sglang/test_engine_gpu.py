"""GPU memory shared by CUDA IPC: with a plain process as the receiver, and with a stock SGLang engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tidemill_testing import tiny_model
from tidemill_weight_update import BucketHandle, WeightUpdater
from tidemill_weight_update.sglang import LocalEngine
from tidemill_weight_update.sglang.payload import stock_payload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Loads as SGLang's scheduler does: torch's rebuild function is patched to find the device by UUID, and copies are
# asynchronous. Each copy is delayed, so that memory that is overwritten too early changes the result.
RECEIVER = """
import base64, json, pickle, sys, torch
from torch.multiprocessing import reductions
original = reductions.rebuild_cuda_tensor
def rebuild_cuda_tensor(*args):
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    return original(*args[:6], uuids.index(args[6]), *args[7:])
reductions.rebuild_cuda_tensor = rebuild_cuda_tensor
weights = {}
for line in sys.stdin:
    if line == "sums\\n":
        torch.cuda.synchronize()
        print(json.dumps({name: tensor.double().sum().item() for name, tensor in weights.items()}), flush=True)
        continue
    payload = pickle.loads(base64.b64decode(line))
    for meta in payload["metadata"]:
        view = payload["flattened_tensor"][meta.start_idx:meta.end_idx].view(meta.dtype).reshape(meta.shape)
        target = weights.setdefault(meta.name, torch.empty_like(view))
        torch.cuda._sleep(20_000_000)  # about 10 ms
        target.copy_(view)
    print("ok", flush=True)
    kept = payload  # the receiver also releases the memory late
"""


class PlainReceiver:
    """Engine client whose engine is RECEIVER."""

    has_loader = False

    def __init__(self) -> None:
        command = [sys.executable, "-c", RECEIVER]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = ""

    @property
    def tp_size(self) -> int:
        return 1

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def load_bucket(self, bucket: BucketHandle) -> None:
        import base64

        if self.ask(base64.b64encode(stock_payload(bucket)).decode()) != "ok\n":
            raise RuntimeError("the receiver failed")

    def flush_cache(self) -> None:
        pass

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def get_weight_version(self) -> str:
        return self.version


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_bucket_is_not_overwritten_before_it_is_copied(device):
    receiver = PlainReceiver()
    updater = WeightUpdater([receiver], bucket_bytes=4 << 20, device=device)
    try:
        for version in range(3):
            torch.manual_seed(version)
            tensors = {f"t{i}": torch.randint(-100, 100, (1 << 18,), device="cuda").float() for i in range(40)}
            tensors["big"] = torch.randint(-100, 100, (3 << 20,), device="cuda").to(torch.bfloat16)
            stats = updater.update(tensors.items(), version)
            assert stats.num_buckets > 10
            sums = json.loads(receiver.ask("sums"))
            assert sums == {name: tensor.double().sum().item() for name, tensor in tensors.items()}
    finally:
        updater.close()
        receiver.process.kill()
        receiver.process.wait()


PROMPT = [5, 6, 7, 8, 9]
SAMPLING = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}


@pytest.mark.sglang
def test_stock_engine_on_a_gpu_gets_every_tensor(send, tmp_path):
    sglang = pytest.importorskip("sglang")
    from safetensors.torch import load_file

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    paths = [tiny_model(tmp_path / str(seed), "qwen3", seed=seed, dtype=torch.bfloat16, **shape) for seed in range(3)]
    loaders = Path(__file__).parents[4] / "testing" / "loaders"
    sys.path.insert(0, str(loaders))  # for the schedulers to import the probe
    engine = sglang.Engine(
        model_path=str(paths[0]),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        attention_backend="triton",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        mem_fraction_static=0.2,
        max_total_tokens=8192,
        log_level="warning",
        custom_weight_loader=["engine_probe.dump", "engine_probe.scramble"],
    )
    sys.path.pop(0)

    def parameters(name: str) -> dict[str, torch.Tensor]:
        named = [(str(tmp_path / name), torch.zeros(1, device="cuda"))]
        assert engine.update_weights_from_tensor(named, load_format="engine_probe.dump", flush_cache=False)[0]
        return torch.load(tmp_path / name)

    def generate() -> dict:
        return engine.generate(input_ids=[PROMPT], sampling_params=SAMPLING, return_logprob=True)[0]

    try:
        for name, tensor in load_file(paths[2] / "model.safetensors", device="cuda").items():
            assert engine.update_weights_from_tensor([(name, tensor)], flush_cache=False)[0]
        assert engine.flush_cache().success
        wanted, reference = parameters("reference"), generate()
        for device, bucket_bytes in (("cuda", 1 << 16), ("cuda", 1 << 30), ("cpu", 1 << 20)):
            named = [("", torch.zeros(1, device="cuda"))]
            assert engine.update_weights_from_tensor(named, load_format="engine_probe.scramble", flush_cache=False)[0]
            send(LocalEngine(engine), paths[1], paths[2], device=device, bucket_bytes=bucket_bytes, rounds=3)
            got = parameters("got")
            assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []
            out = generate()
            assert out["output_ids"] == reference["output_ids"]
            assert out["meta_info"]["weight_version"] == f"{paths[2]}#2"
    finally:
        engine.shutdown()
