"""The same global batch gives the same step, however it is split over ranks and micro-batches, as a plain loop."""

import pytest
import torch
from engine_cases import (
    OPTIMIZER,
    VOCAB,
    build_engine,
    engine_training,
    make_batch,
    plain_training,
    policy_like_loss,
    relative_error,
    shard,
    weights_of,
)
from tidemill_engines import OptimizerConfig
from tidemill_testing import run_ranks, tiny_model

LAYOUTS = {
    1: [
        {},
        {"micro_batch_size_per_gpu": 1},
        {"max_token_len_per_gpu": 40},
        {"model": {"gradient_checkpointing": True}},
        {"model": {"attn_implementation": "sdpa"}},
    ],
    2: [
        {},
        {"micro_batch_size_per_gpu": 1},
        {"max_token_len_per_gpu": 30},
        {"max_token_len_per_gpu": 30, "reshard_after_forward": False},
        {"micro_batch_size_per_gpu": 3, "fsdp_size": 1},
        {"max_token_len_per_gpu": 30, "model": {"gradient_checkpointing": True}},
    ],
    4: [{"max_token_len_per_gpu": 30, "fsdp_size": 2}],
}


def make_batches():
    return [make_batch(13, seed=1, temperature=0.8), make_batch(6, seed=2), make_batch(1, seed=3)]


def check(results, expected, case):
    history, weights = expected
    for rank, (actual_history, actual_weights) in enumerate(results):
        for step, (actual, plain) in enumerate(zip(actual_history, history, strict=True)):
            for name, value in plain.items():
                assert actual[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (case, rank, step, name)
            assert actual["grad_nonfinite"] == 0
        assert list(actual_weights) == list(weights), case
        for name, weight in weights.items():
            assert relative_error(actual_weights[name], weight) < 1e-5, (case, rank, name)


def run_layouts(path, batches, layouts):
    return [engine_training(path, batches, **layout) for layout in layouts]


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_step_does_not_depend_on_the_layout(tmp_path, world_size):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB, tie_word_embeddings=True)
    batches = make_batches()
    expected = plain_training(path, batches)
    results = run_ranks(run_layouts, world_size, path, batches, LAYOUTS[world_size])
    for number, case in enumerate(LAYOUTS[world_size]):
        check([of_rank[number] for of_rank in results], expected, case)


def run_families(paths, batches):
    return [engine_training(path, batches, max_token_len_per_gpu=40) for path in paths]


def test_families_tied_and_untied(tmp_path):
    cases = [
        ("qwen2", True),
        ("qwen2", False),
        ("qwen3", False),
        ("llama", True),
        ("llama", False),
    ]  # qwen3 tied: above
    paths = [
        tiny_model(tmp_path / f"{family}-{tied}", family, vocab_size=VOCAB, tie_word_embeddings=tied)
        for family, tied in cases
    ]
    batches = make_batches()[:2]
    results = run_ranks(run_families, 2, paths, batches)
    for number, (case, path) in enumerate(zip(cases, paths, strict=True)):
        check([of_rank[number] for of_rank in results], plain_training(path, batches), case)


def test_order_of_rows_does_not_matter(tmp_path):
    path = tiny_model(tmp_path / "model", "llama", vocab_size=VOCAB)
    batch = make_batch(11, seed=4)
    mixed = batch.reorder(torch.randperm(11, generator=torch.Generator().manual_seed(0)))
    expected = plain_training(path, [batch])
    results = run_ranks(run_layouts, 2, path, [mixed], [{"max_token_len_per_gpu": 25}])
    check([of_rank[0] for of_rank in results], expected, "mixed")


SCHEDULE = {"lr": 0.008, "lr_scheduler": "linear", "lr_warmup_steps": 2, "total_steps": 4}


def run_reset(path, batches):
    """A first phase with other settings, then a fresh optimizer and schedule from the weights at its end."""
    engine = build_engine(path, optimizer={"lr": 0.1, "lr_warmup_steps": 3})
    engine.train_batch(shard(engine, batches[0]), policy_like_loss, calculate_entropy=True)
    engine.save_hf(path.parent / "between")
    engine.reset_optimizer(OptimizerConfig(**(OPTIMIZER | SCHEDULE)))
    history = [engine.train_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True) for batch in batches]
    weights = weights_of(engine)
    engine.close()
    frozen = build_engine(path, optimizer=False)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        frozen.reset_optimizer(OptimizerConfig())
    frozen.close()
    return history, weights


def test_schedule_reaches_the_weights_and_a_reset_optimizer_starts_anew(tmp_path):
    path = tiny_model(tmp_path / "model", "llama", vocab_size=VOCAB)
    batches = [*make_batches(), make_batch(5, seed=6)]
    rates = [0.004, 0.008, 0.008, 0.004]
    straight = run_ranks(run_layouts, 2, path, batches, [{"optimizer": OPTIMIZER | SCHEDULE}])
    check([of_rank[0] for of_rank in straight], plain_training(path, batches, rates), "schedule")
    assert [metrics["lr"] for metrics in straight[0][0][0]] == rates
    after_reset = run_ranks(run_reset, 2, path, batches)
    check(after_reset, plain_training(tmp_path / "between", batches, rates), "reset")


def run_masked(path, batch):
    mask = batch["response_mask"]
    nothing = batch.select(["input_ids", "responses", "advantages"])
    nothing.batch["response_mask"] = torch.zeros_like(mask)
    out = []
    for batches in ([nothing], [batch[0:0]], [batch[0:1]]):  # all masked; no rows at all; rank 1 has no row
        out.append(engine_training(path, batches, optimizer={"lr": 1e-2, "weight_decay": 0.0}))
    return out, engine_training(path, [])[1]


def test_masked_and_empty_batches_give_no_gradient_and_no_nan(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batch = make_batch(5, seed=5)
    for (masked, empty, one), before in run_ranks(run_masked, 2, path, batch):
        for (metrics,), weights in (masked, empty):
            assert metrics == {
                "loss": 0,
                "pg": 0,
                "nll": 0,
                "entropy": 0,
                "grad_norm": 0,
                "grad_nonfinite": 0,
                "lr": 1e-2,
            }
            assert all(torch.equal(weights[name], before[name]) for name in before)
        assert one[0][0]["grad_norm"] > 0
        assert not torch.equal(one[1]["model.norm.weight"], before["model.norm.weight"])
