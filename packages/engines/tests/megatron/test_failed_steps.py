"""Steps of the Megatron engine that fail: the error is raised on every rank, and the next step is unaffected."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, policy_like_loss, relative_error, shard, weights_of
from tidemill_testing import run_ranks, tiny_model

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.timeout(280)

PP, VPP, CP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "context_parallel_size"
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise torch.OutOfMemoryError("a backward without memory")


def step(engine: Any, batch: Any) -> float:
    return engine.train_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True)["grad_norm"]


def failing_step(engine: Any, batch: Any, where: str, number: int) -> None:
    """Run a step that fails in the forward or the backward of its `number`th micro-batch."""
    from tidemill_engines.megatron.weights.hf_weights import unwrapped

    calls = []

    def fail(module: Any, args: Any, output: Any) -> Any:
        calls.append(module)
        if len(calls) != number:
            return output
        if where == "forward":
            raise torch.OutOfMemoryError("a forward without memory")
        return (FailsBackward.apply(output[0]), *output[1:])

    hook = unwrapped(engine.chunks[0]).decoder.layers[0].mlp.register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError, match=f"a {where} without memory"):
        step(engine, batch)
    assert_refuses(engine, shard(engine, batch))
    hook.remove()


def assert_refuses(engine: Any, rows: Any) -> None:
    """Check that half-done gradients are neither added to nor used."""
    with engine.train_mode(), pytest.raises(RuntimeError, match="or a backward has failed; call optimizer_zero_grad"):
        engine.forward_backward_batch(rows, policy_like_loss, calculate_entropy=True)
    with engine.train_mode(), pytest.raises(RuntimeError, match=r"a backward has failed.*optimizer_zero_grad"):
        engine.optimizer_step()


Failures = dict[int, tuple[str, int]]
RUNS: list[Failures] = [
    {},
    {0: ("backward", 1), 1: ("backward", 3), 2: ("backward", 2)},
    {0: ("backward", 3), 1: ("forward", 1), 2: ("forward", 3)},
    {0: ("forward", 3)},
]
"""For each run, the pass and the micro-batch that fail, by the number of steps before."""


def run_failing_steps(path: Path, batch: Any) -> Any:
    """For each setting the number of buckets, norms and weights of an engine for each of `RUNS`."""
    from tidemill_engines.megatron.parallel import data_parallel

    config = data_parallel.DistributedDataParallelConfig
    data_parallel.DistributedDataParallelConfig = partial(config, bucket_size=3000)  # type: ignore[misc]
    out = []
    for settings in (OVERLAP, {**OVERLAP, "grad_offload": True}, {}):
        runs = []
        for failures in RUNS:
            engine = build_engine(path, backend="megatron", micro_batch_size_per_gpu=1, **settings)
            norms = []
            for number in range(3):
                if number in failures:
                    failing_step(engine, batch, *failures[number])
                norms.append(step(engine, batch))
            runs.append((len(engine.chunks[0].bucket_groups), norms, weights_of(engine)))
            engine.close()
        out.append(runs)
    return out


def test_failed_step_does_not_affect_later_steps(tmp_path):
    path = tiny_model(tmp_path, "qwen3", vocab_size=VOCAB, tie_word_embeddings=False)
    for results in run_ranks(run_failing_steps, 2, path, make_batch(6, seed=1), timeout_s=250):
        assert results[0][0][0] > 5
        for (_, expected_norms, expected_weights), *others in results:
            for _, norms, weights in others:
                assert norms == pytest.approx(expected_norms, rel=1e-6)
                assert all(relative_error(weights[name], weight) < 1e-6 for name, weight in expected_weights.items())


def loss_that_raises(fails: Any) -> Any:
    """A loss that raises an error if `fails()` is true."""

    def loss(*arguments: Any) -> Any:
        if fails():
            raise KeyError("a bug in the loss")
        return policy_like_loss(*arguments)

    return loss


def loss_with_vector_metric(*arguments: Any) -> Any:
    loss, metrics = policy_like_loss(*arguments)
    return loss, {**metrics, "vector": arguments[0].log_probs.detach()}


def loss_with_varying_metrics() -> Any:
    calls: list[int] = []

    def loss(*arguments: Any) -> Any:
        calls.append(1)
        value, metrics = policy_like_loss(*arguments)
        return value, {**metrics, f"number {len(calls)}": value}

    return loss


def on_second_call() -> Any:
    calls: list[int] = []

    def is_due() -> bool:
        calls.append(1)
        return len(calls) == 2

    return is_due


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {PP: 2}),
    ("qwen3", {PP: 2, VPP: 2, **OVERLAP}),
    ("qwen3", {**OVERLAP}),
    ("qwen3", {CP: 2}),
    ("qwen3_moe", {PP: 2, "model": {"router_aux_loss_coef": 0.1}}),
]


def run_failing_losses(paths: dict[str, Path], batch: Any) -> Any:
    """For each layout the errors of some losses, and the norms of steps before and after them."""
    out = []
    for family, settings in LAYOUTS:
        engine = build_engine(paths[family], backend="megatron", micro_batch_size_per_gpu=1, timeout_s=30.0, **settings)
        rows, errors = shard(engine, batch), []
        is_last_rank = torch.distributed.get_rank() == 1
        losses = [
            loss_that_raises(on_second_call()),
            loss_that_raises(lambda last=is_last_rank: last),
            loss_with_vector_metric,
            loss_with_varying_metrics(),
        ]
        norms = [step(engine, batch)]
        for loss in losses:
            with pytest.raises(Exception) as caught:  # noqa: PT011 - kinds and texts are compared outside
                engine.train_batch(rows, loss, calculate_entropy=True)
            errors.append((type(caught.value).__name__, str(caught.value)))
            if len(errors) <= 2:  # the others fail when their metrics are summed, after the backward
                assert_refuses(engine, rows)
        norms.append(step(engine, batch))
        engine.close()
        engine = build_engine(paths[family], backend="megatron", micro_batch_size_per_gpu=1, **settings)
        expected = [step(engine, batch) for _ in range(2)]
        engine.close()
        out.append((errors, norms, expected))
    return out


def test_error_of_a_loss_is_raised_on_every_rank(tmp_path):
    paths = {
        family: tiny_model(tmp_path / family, family, vocab_size=VOCAB, num_hidden_layers=4)
        for family in ("qwen3", "qwen3_moe")
    }
    results = run_ranks(run_failing_losses, 2, paths, make_batch(8, seed=1), timeout_s=250)
    for number, (_, settings) in enumerate(LAYOUTS):
        for rank, (errors, norms, expected) in enumerate(of_rank[number] for of_rank in results):
            has_loss = rank == 1 or PP not in settings
            first, one_rank, vector, others = errors
            own, other = ("KeyError", "'a bug in the loss'"), ("RuntimeError", "rank 1: KeyError: 'a bug in the loss'")
            assert first == (own if has_loss else other)
            assert one_rank == (own if rank == 1 else other)
            assert vector[0] == others[0] == "ValueError"
            assert "metric vector must be 0-d, got shape" in vector[1]
            assert "it must report the same metrics for every micro-batch" in others[1]
            assert norms == pytest.approx(expected, rel=1e-6)


def run_after_close(path: Path, batch: Any) -> list[str]:
    engine = build_engine(path, backend="megatron")
    engine.close()
    messages = []
    for call in (engine.infer_batch, partial(engine.train_batch, loss_fn=policy_like_loss)):
        with pytest.raises(RuntimeError) as caught:
            call(batch)
        messages.append(str(caught.value))
    return messages


def test_closed_engine_is_not_initialized(tmp_path):
    path = tiny_model(tmp_path, "qwen3", vocab_size=VOCAB)
    for messages in run_ranks(run_after_close, 1, path, make_batch(3)):
        assert messages == ["the engine is not initialized; call initialize() first"] * 2
