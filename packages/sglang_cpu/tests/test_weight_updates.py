"""All weight updates of SGLang: afterwards the engine answers as transformers does with the new weights."""

import threading
import time

import pytest
import torch
from tidemill_testing import tiny_model
from tidemill_testing.ports import free_ports

pytestmark = pytest.mark.sglang

PROMPTS = [[5, 6, 7], [9] * 20, list(range(3, 80))]


@pytest.fixture
def new_weights(tmp_path, request, reference):
    """Model with the engine's shape, and with weights that no other test uses."""
    seed = 1 + sum(request.node.name.encode())
    return reference.load(tiny_model(tmp_path / "new", "qwen3", num_hidden_layers=3, seed=seed))


@pytest.fixture(autouse=True)
def restore(engine, checkpoint):
    yield
    # A request that has been answered leaves with the scheduler's next step. Until then, SGLang cannot flush its cache,
    # and a scheduler that cannot flush after an update ends.
    deadline = time.monotonic() + 30
    while not engine.flush_cache().success:
        assert time.monotonic() < deadline, "the engine did not become idle"
        time.sleep(0.01)
    assert engine.update_weights_from_disk(str(checkpoint))[0]


@pytest.fixture
def check(reference):
    """`check(engine, model)`: check that the engine generates the same tokens and log-probabilities as `model`."""

    def run(engine, model):
        outputs = engine.generate(
            input_ids=PROMPTS,
            sampling_params={"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
            return_logprob=True,
        )
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output["output_ids"] == reference.greedy(model, prompt, 8)
            expected = reference.log_probs(model, prompt, output["output_ids"])
            torch.testing.assert_close(reference.engine_log_probs(output), expected, atol=1e-4, rtol=0)

    return run


def named(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def fused(model):
    """Parameters under the engine's names, with q, k, v and gate, up concatenated."""
    state, out = dict(named(model)), {}
    for name, tensor in state.items():
        if ".q_proj." in name:
            parts = [state[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            out[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".gate_proj." in name:
            out[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, state[name.replace("gate", "up")]])
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            out[name] = tensor
    return list(out.items())


def test_update_from_tensor(engine, new_weights, check):
    assert engine.update_weights_from_tensor(named(new_weights))[0]
    check(engine, new_weights)


def test_update_from_tensor_direct(engine, new_weights, check):
    assert engine.update_weights_from_tensor(fused(new_weights), load_format="direct")[0]
    check(engine, new_weights)


def test_update_from_tensor_with_a_custom_loader(engine, new_weights, check):
    result = engine.update_weights_from_tensor(named(new_weights), load_format="reversed_loader.load_reversed")
    assert result[0], result
    check(engine, new_weights)


def test_update_from_flattened_bucket(engine, new_weights, check):
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=named(new_weights))
    payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[MultiprocessingSerializer.serialize(payload)],
        load_format="flattened_bucket",
        weight_version="7",
    )
    result = engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_tensor(request, None))
    assert result[0], result
    check(engine, new_weights)
    output = engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 1})
    assert output["meta_info"]["weight_version"] == "7"


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_update_from_distributed_over_gloo(engine, new_weights, check, load_format):
    from sglang.srt.utils import init_custom_process_group
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    tensors, (port,) = named(new_weights), free_ports(1)

    def send():
        group = init_custom_process_group(
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=2,
            rank=0,
            group_name="update",
        )
        if load_format is None:
            for _, tensor in tensors:
                torch.distributed.broadcast(tensor, src=0, group=group)
        else:
            flat = FlattenedTensorBucket(named_tensors=tensors).get_flattened_tensor()
            torch.distributed.broadcast(flat, src=0, group=group)
        torch.distributed.destroy_process_group(group)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    assert engine.init_weights_update_group("127.0.0.1", port, 1, 2, "update", backend="gloo")[0]
    result = engine.update_weights_from_distributed(
        names=[name for name, _ in tensors],
        dtypes=["float32"] * len(tensors),
        shapes=[list(tensor.shape) for _, tensor in tensors],
        group_name="update",
        load_format=load_format,
    )
    sender.join(timeout=30)
    assert not sender.is_alive()
    assert result[0], result
    assert engine.destroy_weights_update_group("update")[0]
    check(engine, new_weights)


def test_update_from_disk(engine, new_weights, check, tmp_path):
    assert engine.update_weights_from_disk(str(tmp_path / "new"))[0]
    check(engine, new_weights)
