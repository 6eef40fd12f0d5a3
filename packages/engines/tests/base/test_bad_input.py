"""Invalid input and failures: a clear error on every rank, and no hang."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from engine_cases import VOCAB, build_engine, make_batch, policy_like_loss, shard, weights_of
from tidemill_dataproto import ragged
from tidemill_testing import run_ranks, tiny_model


def without(batch, name):
    return batch.select([key for key in batch.batch.keys() if key != name])  # noqa: SIM118 - a TensorDict


def with_column(batch, name, column):
    changed = without(batch, name)
    changed.batch[name] = column
    return changed


def with_token(batch, token):
    flat = ragged.values(batch["input_ids"]).clone()
    flat[0] = token
    return with_column(batch, "input_ids", ragged.like(flat, batch["input_ids"]))


def with_temperature(batch, temperature):
    changed = batch.clone()
    changed.meta_info["temperature"] = temperature
    return changed


BAD = {
    "no responses": (lambda b: without(b, "responses"), ValueError, "lacks responses"),
    "no mask": (lambda b: without(b, "response_mask"), ValueError, "lacks response_mask"),
    "token too large": (lambda b: with_token(b, VOCAB), ValueError, f"token id {VOCAB}.*vocabulary of {VOCAB}"),
    "token negative": (lambda b: with_token(b, -1), ValueError, "row 0 .*token id -1"),
    "mask of other rows": (
        lambda b: with_column(b, "response_mask", b["input_ids"]),
        ValueError,
        "row 0 of response_mask has .* elements but its response has",
    ),
    "advantages of other rows": (
        lambda b: with_column(b, "advantages", ragged.like(ragged.values(b["input_ids"]).float(), b["input_ids"])),
        ValueError,
        "row 0 of advantages has .* elements but its response has",
    ),
    **{
        f"{name} of other rows": (
            lambda b, name=name: with_column(
                b, name, ragged.like(ragged.values(b["input_ids"]).float(), b["input_ids"])
            ),
            ValueError,
            f"row 0 of {name} has .* elements but its response has",
        )
        for name in ("loss_weights", "rollout_is_weights", "teacher_log_prob")
    },
    "padded advantages": (
        lambda b: with_column(b, "advantages", torch.zeros(len(b), 7)),
        ValueError,
        r"column advantages must be shaped like responses.* got a tensor \[4, 7\]",
    ),
    "mask not a number": (
        lambda b: with_column(
            b, "response_mask", ragged.like(torch.full_like(ragged.values(b["advantages"]), torch.nan), b["responses"])
        ),
        ValueError,
        "row 0 of response_mask contains nan; it must be 0 for",
    ),
    "mask of vectors": (
        lambda b: with_column(
            b, "response_mask", ragged.like(torch.ones(len(ragged.values(b["responses"])), 3), b["responses"])
        ),
        ValueError,
        r"response_mask must be shaped like responses, \[B, j\]; got a tensor \[B, j, 3\]",
    ),
    "no batch": (lambda b: None, TypeError, "batch must be a DataProto, got a NoneType"),
    "a dict": (lambda b: {"input_ids": 1}, TypeError, "batch must be a DataProto, got a dict"),
    "other response": (
        lambda b: with_column(b, "responses", ragged.like(ragged.values(b["responses"]) + 1, b["responses"])),
        ValueError,
        "must end with its response",
    ),
    "no prompt": (lambda b: with_column(b, "input_ids", b["responses"]), ValueError, "at least one prompt token"),
    "padded": (
        lambda b: with_column(b, "input_ids", ragged.to_padded(b["input_ids"], 0)),
        TypeError,
        "must be ragged.*from_padded",
    ),
    "float tokens": (lambda b: with_column(b, "input_ids", b["input_ids"].float()), TypeError, "integer token ids"),
    "temperature": (lambda b: with_temperature(b, 0), ValueError, "temperature.*positive number; got 0"),
    "experts": (
        lambda b: with_column(b, "routed_experts", b["input_ids"]),
        ValueError,
        r"routed_experts, which requires MegatronConfig.router_replay=True \(FSDP2 does not support it\); set it",
    ),
    "row above the cap": (lambda b: make_batch(3, longest=60), ValueError, "above max_token_len_per_gpu=20"),
}


def run_bad_batches(path, batch, changes):
    engine = build_engine(path, max_token_len_per_gpu=20)
    good = shard(engine, batch)
    caught = {}
    for name, change in changes.items():
        bad = change(good) if engine.get_data_parallel_rank() == 1 else good
        try:
            engine.train_batch(bad, policy_like_loss, calculate_entropy=True)
        except (ValueError, TypeError) as error:
            caught[name] = (type(error), str(error))
    after = engine.train_batch(good, policy_like_loss, calculate_entropy=True)  # the ranks are still synchronized
    engine.close()
    return caught, after


def test_invalid_batch_on_one_rank_raises_on_every_rank(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    changes = {name: change for name, (change, _, _) in BAD.items()}
    (on_other, after), (on_own, after_own) = run_ranks(run_bad_batches, 2, path, make_batch(8, seed=1), changes)
    for name, (_, kind, message) in BAD.items():
        for caught in (on_other, on_own):
            assert name in caught, f"{name}: not refused"
            assert caught[name][0] is kind
            with pytest.raises(kind, match=message):
                raise kind(caught[name][1])
        assert on_other[name][1] == f"rank 1: {on_own[name][1]}"
    assert after == after_own


def run_other_columns(path, batch):
    engine = build_engine(path)
    good = shard(engine, batch)
    bad = without(good, "advantages") if engine.get_data_parallel_rank() == 1 else good
    with pytest.raises(ValueError, match="rank 1 lacks the column advantages, which the batch of rank 0 has"):
        engine.train_batch(bad, policy_like_loss, calculate_entropy=True)
    loss = engine.train_batch(good, policy_like_loss, calculate_entropy=True)["loss"]
    engine.close()
    return loss


def test_different_columns_on_ranks_are_rejected(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    losses = run_ranks(run_other_columns, 2, path, make_batch(8, seed=1))
    assert losses[0] == losses[1]


def run_fixed_micro_batches(path, batch):
    engine = build_engine(path, micro_batch_size_per_gpu=2, max_token_len_per_gpu=30)
    few = shard(engine, batch)
    rows = make_batch(4, seed=1, longest=15) if engine.get_data_parallel_rank() == 1 else few
    with pytest.raises(ValueError, match="above max_token_len_per_gpu") as caught:
        engine.train_batch(rows, policy_like_loss, calculate_entropy=True)
    loss = engine.train_batch(few, policy_like_loss, calculate_entropy=True)["loss"]
    engine.close()
    return str(caught.value), loss


def test_fixed_micro_batch_above_token_limit_is_rejected(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    (on_other, loss), (on_own, same) = run_ranks(run_fixed_micro_batches, 2, path, make_batch(8, seed=1, longest=5))
    message = r"micro-batch \d of micro_batch_size_per_gpu=2 rows has \d+ tokens, above max_token_len_per_gpu=30; lower"
    with pytest.raises(ValueError, match="^" + message):
        raise ValueError(on_own)
    assert on_other == f"rank 1: {on_own}"
    assert loss == same


WRONG = {
    "no metrics": (
        lambda total: total,
        "TypeError: a loss must return (loss, metrics), a 0-d tensor and a dict; got a Tensor",
    ),
    "its name taken": (lambda total: (total, {"loss": total}), "ValueError: the loss reports a metric 'loss', a name"),
    "a vector": (lambda total: (total[None], {}), "ValueError: the loss must be 0-d, got shape (1,)"),
    "a number": (lambda total: (0.5, {}), "TypeError: the loss must be a tensor, got a float"),
    "a number as metric": (lambda total: (total, {"x": 1.0}), "TypeError: metric x must be a tensor, got a float"),
}


def loss_of_kind(kind):
    def loss(output, micro_batch, normalizer):
        total, metrics = policy_like_loss(output, micro_batch, normalizer)
        rank = torch.distributed.get_rank()
        if kind == "inf" and rank == 1:
            return total * torch.inf, metrics
        if kind == "nan":
            return total * torch.nan, metrics
        if kind == "raises":
            raise KeyError("a bug in the loss")
        if kind == "reserved":
            return total, {"lr": total}
        if kind == "other metrics" and rank == 1:
            return total, {"pg": total}
        if kind == "constant":
            return torch.zeros(()), {}
        if kind in WRONG:
            return WRONG[kind][0](total)
        return total, metrics

    return loss


def run_bad_losses(path, batch):
    engine = build_engine(path, max_token_len_per_gpu=40, optimizer={"lr": 1e-2, "weight_decay": 0.0})
    rows = shard(engine, batch)
    before, out = weights_of(engine), {}
    for kind in ("inf", "nan", "constant", "raises", "reserved", "other metrics", *WRONG):
        try:
            out[kind] = engine.train_batch(rows, loss_of_kind(kind), calculate_entropy=True)
        except (KeyError, TypeError, ValueError) as error:
            out[kind] = f"{type(error).__name__}: {error}"
        same = all(torch.equal(weight, before[name]) for name, weight in weights_of(engine).items())
        assert same, f"{kind} changed the weights"
    good = engine.train_batch(rows, policy_like_loss, calculate_entropy=True)
    engine.close()
    fresh = build_engine(path, max_token_len_per_gpu=40, optimizer={"lr": 1e-2, "weight_decay": 0.0})
    expected = fresh.train_batch(rows, policy_like_loss, calculate_entropy=True)
    fresh.close()
    return out, good, expected


def test_engine_is_usable_after_nonfinite_gradient_or_invalid_loss(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    for out, good, expected in run_ranks(run_bad_losses, 2, path, make_batch(8, seed=2)):
        assert out["inf"]["grad_nonfinite"] == 1
        assert out["nan"]["grad_nonfinite"] == 1
        assert out["constant"] == {"loss": 0, "grad_norm": 0, "grad_nonfinite": 0, "lr": 1e-2}
        assert out["raises"] == "KeyError: 'a bug in the loss'"
        assert "ValueError: the loss reports metrics under the engine's own names ['lr']" in out["reserved"]
        assert "on rank 0 but ['loss', 'pg'] on rank 1" in out["other metrics"]
        assert all(out[kind].startswith(message) for kind, (_, message) in WRONG.items()), out
        assert good == expected


def run_late_peer(path, batch):
    engine = build_engine(path, timeout_s=8.0)
    store = dist.distributed_c10d._get_default_store()
    if engine.get_data_parallel_rank() == 1:
        store.wait(["rank 0 has failed"], timedelta(seconds=100))
        return
    with pytest.raises(RuntimeError, match="rank 0 lost another rank, which exited or did not respond within"):
        engine.train_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True)
    store.set("rank 0 has failed", "")


def test_missing_rank_is_an_error_after_timeout(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    run_ranks(run_late_peer, 2, path, make_batch(4))  # fails if rank 0 waits longer than rank 1 does


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_different_models_on_ranks_are_rejected(tmp_path, backend):
    """Different folders under the same name on different machines."""
    for rank, layers in enumerate((2, 3)):
        tiny_model(tmp_path / str(rank), "qwen3", vocab_size=VOCAB, num_hidden_layers=layers)
    assert run_ranks(run_different_models, 2, tmp_path, backend) == [True, True]


def run_different_models(folder, backend):
    with pytest.raises(ValueError, match=r"rank 1 has another .* than rank 0; use the same on all ranks"):
        build_engine(folder / str(torch.distributed.get_rank()), backend=backend)
    build_engine(folder / "0", backend=backend).close()
    return True


def run_missing_model(path):
    with pytest.raises(FileNotFoundError, match=r"no config.json.*hf download"):
        build_engine(path)
    with pytest.raises(ValueError, match="fsdp_size must divide the world size 2; got 3"):
        build_engine(path, fsdp_size=3)
    return True


def test_missing_model_and_invalid_fsdp_size_are_rejected(tmp_path):
    assert run_ranks(run_missing_model, 2, tmp_path / "nothing") == [True, True]


def test_methods_before_initialize_and_without_optimizer_raise(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batch = make_batch(2)
    engine = build_engine(path, optimizer=False)
    with pytest.raises(RuntimeError, match="already"):
        engine.initialize()
    for train in (engine.train_batch, engine.forward_backward_batch):
        with pytest.raises(RuntimeError, match="no optimizer"):
            train(batch, policy_like_loss)
    with pytest.raises(RuntimeError, match="no optimizer"):
        engine.optimizer_step()
    with pytest.raises(ValueError, match="requires a loss_fn"):
        engine.forward_backward_batch(batch, None)
    engine.close()
    with pytest.raises(RuntimeError, match="call initialize"):
        engine.infer_batch(batch)


def test_incomplete_environment_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        build_engine(tmp_path)


def test_missing_cuda_device_is_refused_and_a_single_visible_one_is_used(monkeypatch):
    from tidemill_engines.distributed.device import resolve_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="sees no CUDA device"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RuntimeError, match="LOCAL_RANK is 2 but torch sees 2"):
        resolve_device("auto")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("auto") == torch.device("cuda", 0)
