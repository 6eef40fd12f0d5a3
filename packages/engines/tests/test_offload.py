"""Offloading and other memory-saving settings do not change results."""

import logging
from functools import partial

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, policy_like_loss, shard, weights_of
from tidemill_engines import FSDP2Config, LoraConfig
from tidemill_testing import run_ranks, tiny_model
from torch.multiprocessing.reductions import StorageWeakRef


def device_bytes(engine):
    """Return the device bytes of parameters, gradients and optimizer state, each storage once."""

    def total(tensors):
        storages = {}
        for tensor in tensors:
            storage = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
            storages[storage._cdata] = storage.size()
        return sum(storages.values())

    params = list(engine.model.parameters())
    state = [value for state in engine.optimizer.state.values() for value in state.values() if value.dim() > 0]
    grads = [param.grad for param in params if param.grad is not None]
    return total(param.detach() for param in params), total(grads), total(state)


def run_offload(path, batches, offload, folder):
    engine = build_engine(path, max_token_len_per_gpu=40, **offload)
    seen = {"start": device_bytes(engine)}
    if offload.get("param_offload"):
        with pytest.raises(RuntimeError, match=r"params: offloaded to the CPU; call this within .* eval_mode"):
            engine.forward_backward_batch(batches[0], None, forward_only=True)
    if offload.get("optimizer_offload"):
        with pytest.raises(RuntimeError, match=r"grads: offloaded to the CPU; call this within train_mode"):
            engine.optimizer_step()
        with engine.eval_mode(), pytest.raises(RuntimeError, match="optimizer: offloaded"):
            engine.apply_gradient(1.0)
    rows = [shard(engine, batch) for batch in batches]

    def loss(output, micro_batch, normalizer):
        seen["in a step"] = device_bytes(engine)
        return policy_like_loss(output, micro_batch, normalizer)

    def apply_gradient(norm):
        seen["in the optimizer"] = device_bytes(engine)
        type(engine).apply_gradient(engine, norm)

    engine.apply_gradient = apply_gradient
    history = [engine.train_batch(rows[0], loss, calculate_entropy=True)]
    seen["after a step"] = device_bytes(engine)
    log_probs = engine.infer_batch(rows[1])["log_probs"].values()
    with engine.eval_mode():
        seen["evaluating"] = device_bytes(engine)
        listed = list(engine.get_per_tensor_param())
        assert engine.streams_weights is (offload.get("param_offload", False) or offload.get("offload_policy", False))
    weights = {name: weight.full_tensor() for name, weight in listed}  # still valid after everything is offloaded again
    engine.save_checkpoint(folder)
    engine.save_hf(folder / "hf")
    seen["after saving"] = device_bytes(engine)
    engine.train_batch(rows[1], policy_like_loss, calculate_entropy=True)
    engine.load_checkpoint(folder)
    seen["after loading"] = device_bytes(engine)
    again = weights_of(engine)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    with engine.train_mode():
        engine.forward_backward_batch(rows[1], policy_like_loss, calculate_entropy=True)
        seen["with gradients"] = device_bytes(engine)
    seen["gradients away"] = device_bytes(engine)
    with engine.train_mode():
        norm = engine.optimizer_step()
        lr = engine.lr_scheduler_step()
        engine.optimizer_zero_grad()
    history.append({"grad_norm": norm, "lr": lr})
    engine.reset_optimizer(engine.optimizer_config)
    seen["after a reset"] = device_bytes(engine)
    weights = weights_of(engine)
    with engine.offloaded_later("params", "optimizer"):
        history += [engine.train_batch(batch, policy_like_loss, calculate_entropy=True) for batch in rows]
        seen["offloaded later"] = device_bytes(engine)
        sent = weights_of(engine)
    assert all(torch.equal(sent[name], weight) for name, weight in weights_of(engine).items())
    seen["offloaded then"] = device_bytes(engine)
    engine.close()
    return seen, history, log_probs, weights


def run_outputs(path, batch):
    """Return for each call of the loss how many earlier micro-batches still have outputs in memory."""
    engine = build_engine(path, micro_batch_size_per_gpu=1, model={"output_router_logits": True})
    outputs, kept = [], []

    def loss(output, micro_batch, normalizer):
        kept.append([name for names in outputs for name, memory in names.items() if not memory.expired()])
        outputs.append({name: StorageWeakRef(column.untyped_storage()) for name, column in output.columns().items()})
        return policy_like_loss(output, micro_batch, normalizer)

    engine.train_batch(batch, loss, calculate_entropy=True)
    engine.close()
    return kept


def test_training_step_keeps_no_outputs(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3_moe", vocab_size=VOCAB)
    assert run_ranks(run_outputs, 1, path, make_batch(4, seed=1)) == [[[], [], [], []]]


OFFLOADS = [
    {},
    {"param_offload": True},
    {"optimizer_offload": True, "grad_offload": True, "reshard_after_forward": False},
    {"param_offload": True, "grad_offload": True, "optimizer_offload": True, "fsdp_size": 1},
    {"param_offload": True, "grad_offload": True, "optimizer_offload": True},
    {"offload_policy": True},
]


def run_offloads(path, batches, folder):
    return [run_offload(path, batches, offload, folder / str(n)) for n, offload in enumerate(OFFLOADS)]


def test_offload_frees_memory_and_is_bitwise_neutral(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batches = [make_batch(9, seed=1), make_batch(7, seed=2)]
    for results in run_ranks(run_offloads, 2, path, batches, tmp_path):
        plain, history, log_probs, weights = results[0]
        assert all(size > 0 for size in (*plain["with gradients"], plain["start"][2]))
        for offload, (seen, *rest) in zip(OFFLOADS[1:], results[1:], strict=True):
            layout = {"fsdp_size", "reshard_after_forward"} & offload.keys()  # sums gradients in another order
            same = partial(torch.allclose, rtol=1e-4, atol=1e-6) if layout else torch.equal
            assert rest[0] == history or layout, offload
            for actual, expected in zip(rest[0], history, strict=True):
                assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6), offload
            assert same(rest[1], log_probs), offload
            assert all(same(rest[2][name], weight) for name, weight in weights.items()), offload
            if "offload_policy" in offload:
                continue
            params, grads, state = (offload.get(f"{kind}_offload") for kind in ("param", "grad", "optimizer"))
            for moment in ("start", "after a step", "after saving", "after loading", "after a reset", "offloaded then"):
                sizes = seen[moment]
                assert (sizes[0] == 0, sizes[1] == 0, sizes[2] == 0) == (bool(params), True, bool(state)), moment
            assert seen["gradients away"][1] == 0 if grads else seen["gradients away"][1] > 0
            assert all(seen["offloaded later"][kind] > 0 for kind in (0, 2))
            assert (seen["in a step"][0] > 0, seen["in a step"][2] == 0) == (True, bool(state))
            assert all(size > 0 for size in seen["in the optimizer"]), (offload, seen)
            assert all(size > 0 for size in seen["with gradients"][:2])
            assert (seen["evaluating"][0] > 0, seen["evaluating"][2] == 0) == (True, bool(state))


SAVINGS = [
    {},
    {"model": {"gradient_checkpointing": True}},
    {"model": {"gradient_checkpointing": True, "recompute": "selective"}},
    {"wrap_classes": ("Qwen3MLP",)},
]


def run_unknown_layers(path, batch):
    """Return the weights after a step of a model class without _no_split_modules."""
    from transformers import Qwen3ForCausalLM, Qwen3PreTrainedModel

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("tidemill_engines.fsdp2.model").addHandler(handler)
    Qwen3PreTrainedModel._no_split_modules = None  # affects only this rank process
    Qwen3ForCausalLM._no_split_modules = None
    engine = build_engine(path, max_token_len_per_gpu=40)
    engine.train_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True)
    weights = weights_of(engine)
    engine.close()
    [message] = records
    assert "sharded as one unit" in message
    assert "FSDP2Config.wrap_classes" in message
    return weights


def run_savings(path, batch):
    out = []
    for settings in SAVINGS:
        engine = build_engine(path, max_token_len_per_gpu=40, **settings)
        products = count_products(
            lambda e=engine: e.train_batch(shard(e, batch), policy_like_loss, calculate_entropy=True)
        )
        out.append((products, weights_of(engine)))
        engine.close()
    out.append((0, run_unknown_layers(path, batch)))
    with pytest.raises(ValueError, match=r"wrap_classes: Qwen3ForCausalLM has no Block; it has .*Qwen3DecoderLayer"):
        build_engine(path, wrap_classes=("Block",))
    return out


def count_products(run):
    """Count the matrix products of `run`."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += func is torch.ops.aten.mm.default
            return func(*args, **({} if kwargs is None else kwargs))

    with Count() as count:
        run()
    return count.number


def test_recomputation_and_wrap_classes_are_bitwise_neutral(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    for results in run_ranks(run_savings, 2, path, make_batch(9, seed=3)):
        (products, weights), (full, _), (selective, _), *_ = results
        assert products == selective < full
        for _, others in results[1:]:
            for name, weight in weights.items():
                torch.testing.assert_close(others[name], weight, rtol=1e-5, atol=1e-6)


def run_precisions(path, batch):
    out = []
    for settings in (
        {},
        {"param_dtype": "bfloat16"},
        {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", "fsdp_size": 1, "reshard_after_forward": False},
        {"param_dtype": "bfloat16", "model": {"dtype": "bfloat16", "lora": LoraConfig(rank=2)}},
    ):
        engine = build_engine(path, max_token_len_per_gpu=40, **settings)
        history = [engine.train_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True) for _ in range(2)]
        state = {value.dtype for state in engine.optimizer.state.values() for value in state.values()}
        out.append((history, {weight.dtype for weight in weights_of(engine).values()}, state))
        engine.close()
    return out


def test_mixed_precision_keeps_master_weights(tmp_path):
    path = tiny_model(tmp_path / "model", "llama", vocab_size=VOCAB)
    for (exact, masters, _), *halves in run_ranks(run_precisions, 2, path, make_batch(9, seed=3)):
        assert masters == {torch.float32}
        for number, (history, weights, state) in enumerate(halves):
            kept = torch.bfloat16 if number == 2 else torch.float32
            assert weights == {kept}
            assert state == {kept, torch.float32}  # the step count is float32
            assert history[0]["loss"] == pytest.approx(exact[0]["loss"], rel=0.02, abs=0.05)
            assert history[0]["loss"] != exact[0]["loss"]  # bfloat16 was used
            if number < 2:
                assert history[0]["grad_norm"] == pytest.approx(exact[0]["grad_norm"], rel=0.05)


def run_compiled(path, batch):
    out = []
    for settings in (
        {},
        {"model": {"compile_layers": True}},
        {"model": {"compile_layers": True, "gradient_checkpointing": True}},
    ):
        engine = build_engine(path, micro_batch_size_per_gpu=3, **settings)
        metrics = engine.train_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True)
        out.append((metrics, weights_of(engine)))
        engine.close()
    return out


@pytest.mark.slow
def test_compiled_layers_equal_eager(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    for plain, *compiled in run_ranks(run_compiled, 2, path, make_batch(9, seed=3), timeout_s=900):
        for metrics, weights in compiled:
            assert metrics == pytest.approx(plain[0], rel=1e-4, abs=1e-6)
            for name, weight in plain[1].items():
                torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)


def test_offload_policy_excludes_other_offloads():
    with pytest.raises(ValueError, match="offload_policy keeps parameters, gradients and optimizer state on the CPU"):
        FSDP2Config(offload_policy=True, param_offload=True)
