"""An exception within a step propagates and does not affect the next step."""

from functools import partial

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, policy_like_loss, shard, weights_of
from tidemill_testing import run_ranks, tiny_model


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("a bug in a backward")


def interrupt(engine, rows, where, number):
    """Raise in a step or in `infer_batch` at the `number`th call of a part of the model or of the loss."""
    calls = []

    def is_due():
        calls.append(where)
        return len(calls) == number

    def of_layer(module, args, output):
        if not is_due():
            return output
        if where == "backward":
            return FailsBackward.apply(output)
        raise KeyError("a bug in a layer")

    def of_inputs(micro_batch):
        if is_due():
            raise KeyError("a bug in the inputs")
        return type(engine).prepare_model_inputs(engine, micro_batch)

    def of_loss(*arguments):
        if where == "loss" and is_due():
            raise KeyError("a bug in the loss")
        return policy_like_loss(*arguments)

    hook = None
    if where == "inputs":
        engine.prepare_model_inputs = of_inputs
    elif where != "loss":
        hook = engine.model.get_submodule("model.layers.1.mlp").register_forward_hook(of_layer)
    step = partial(engine.train_batch, loss_fn=of_loss, calculate_entropy=True)
    with pytest.raises((KeyError, torch.OutOfMemoryError), match="a bug in"):
        (engine.infer_batch if where == "infer" else step)(rows)
    if hook is None:
        engine.__dict__.pop("prepare_model_inputs", None)
    else:
        hook.remove()
    if where != "infer":
        batches = partial(engine.forward_backward_batch, rows, policy_like_loss, calculate_entropy=True)
        for call in (batches, engine.optimizer_step):
            with engine.train_mode(), pytest.raises(RuntimeError, match=r"a backward has failed.*optimizer_zero_grad"):
                call()


def trained(engine, rows):
    history = [engine.train_batch(rows, policy_like_loss, calculate_entropy=True) for _ in range(2)]
    return history, weights_of(engine)


def run_interrupted(path, batch, cases):
    """Return for each case whether two steps after the exception equal those of a new engine, and the error."""
    out = []
    for settings, interruptions in cases:
        fresh = build_engine(path, micro_batch_size_per_gpu=1, **settings)
        rows = shard(fresh, batch)
        history, weights = trained(fresh, rows)
        fresh.close()
        for where, number in interruptions:
            engine = build_engine(path, micro_batch_size_per_gpu=1, **settings)
            interrupt(engine, rows, where, number)
            if where == "infer":
                engine.reset_optimizer(engine.optimizer_config)
            after, weights_after = trained(engine, rows)
            engine.close()
            same = after == history and all(torch.equal(weights_after[name], weights[name]) for name in weights)
            out.append((same, settings, where, number, after, history))
    return out


OFFLOAD = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
MIDWAY = [("loss", 3), ("forward", 3), ("backward", 3)]
EVERYWHERE = [*MIDWAY, ("inputs", 1), ("forward", 1), ("backward", 1), ("infer", 2)]
CASES = {
    1: [({}, EVERYWHERE), ({"reshard_after_forward": False}, MIDWAY)],
    2: [
        ({}, EVERYWHERE),
        ({"reshard_after_forward": False}, EVERYWHERE),
        ({"param_dtype": "bfloat16"}, MIDWAY),
        ({"fsdp_size": 1}, MIDWAY),
        (OFFLOAD, [("forward", 2), ("backward", 2), ("infer", 1)]),
        ({"model": {"gradient_checkpointing": True}}, [("forward", 2), ("backward", 2)]),
    ],
    4: [({"fsdp_size": 2}, MIDWAY), ({"fsdp_size": 2, "reshard_after_forward": False}, MIDWAY)],
}


@pytest.mark.parametrize("world_size", sorted(CASES))
def test_step_after_failed_step_is_unaffected(tmp_path, world_size):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB, tie_word_embeddings=False)
    batch = make_batch(4 * world_size, seed=1)
    for results in run_ranks(run_interrupted, world_size, path, batch, CASES[world_size], timeout_s=300):
        assert len(results) == sum(len(interruptions) for _, interruptions in CASES[world_size])
        for same, *case in results:
            assert same, case
