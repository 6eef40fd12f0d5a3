"""Steps within contexts that disable gradients, and reads of weights between backward and step."""

from contextlib import nullcontext

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, plain_training, policy_like_loss, shard, train
from tidemill_testing import run_ranks, tiny_model

pytestmark = pytest.mark.timeout(200)
SEEDS = [1, 2, 3, 4]


def run_contexts(path, backend):
    """Return the norms of steps in contexts without gradients; the last step is outside of any."""
    engine = build_engine(path, backend=backend)
    contexts = (torch.inference_mode, torch.no_grad, engine.eval_mode)
    batches = [shard(engine, batch_of(seed)) for seed in SEEDS]
    norms = []
    for batch, context in zip(batches, [*contexts, nullcontext], strict=True):
        with context():
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            assert not engine.infer_batch(batch)["log_probs"].requires_grad
            norms.append(engine.train_batch(batch, policy_like_loss, calculate_entropy=True)["grad_norm"])
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    engine.close()
    return norms


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_train_mode_enables_gradients_in_any_context(tmp_path, backend):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    history, _ = plain_training(path, [batch_of(seed) for seed in SEEDS])
    for norms in run_ranks(run_contexts, 2, path, backend):
        assert norms == pytest.approx([metrics["grad_norm"] for metrics in history], rel=1e-5)


def batch_of(seed):
    return make_batch(9, seed=seed)


def run_between(path, settings):
    """Return the norms of steps; from the second on, the weights are read between backward and step."""
    engine = build_engine(path, backend="megatron", **settings)
    uses = [
        lambda: None,
        lambda: dict(engine.get_per_tensor_param()),
        lambda: engine.infer_batch(shard(engine, batch_of(0))),
        lambda: dict(engine.get_per_tensor_shards()),
    ]
    norms = []
    for seed, use in zip(SEEDS, uses, strict=True):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(shard(engine, batch_of(seed)), policy_like_loss, calculate_entropy=True)
            use()
            norms.append(engine.optimizer_step())
            engine.lr_scheduler_step()
    norms += [metrics["grad_norm"] for metrics in train(engine, [5])]
    engine.close()
    return norms


@pytest.mark.parametrize("settings", [{}, {"overlap_grad_reduce": True, "overlap_param_gather": True}])
def test_weights_read_before_update_are_not_reused_after_it(tmp_path, settings):
    pytest.importorskip("megatron.core")
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    history, _ = plain_training(path, [batch_of(seed) for seed in [*SEEDS, 5]])
    for norms in run_ranks(run_between, 2, path, settings):
        assert norms == pytest.approx([metrics["grad_norm"] for metrics in history], rel=1e-5)
