"""AdamW, parameter groups, schedules, and non-finite gradients."""

import gc
import logging

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, policy_like_loss, shard, train, weights_of
from tidemill_engines.config import OptimizerConfig, ParamGroup
from tidemill_engines.optimizer import build_adamw, group_params, learning_rate
from tidemill_testing import run_ranks, tiny_model


def test_learning_rate_follows_each_schedule():
    constant = OptimizerConfig(lr=2.0, lr_warmup_steps=4)
    assert [learning_rate(constant, step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    linear = OptimizerConfig(lr=2.0, lr_scheduler="linear", lr_warmup_steps=1, total_steps=5, min_lr_ratio=0.5)
    assert [learning_rate(linear, step) for step in range(7)] == [2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]
    cosine = OptimizerConfig(lr=2.0, lr_scheduler="cosine", total_steps=4)
    assert [learning_rate(cosine, step) for step in (0, 2, 4, 9)] == pytest.approx([2.0, 1.0, 0.0, 0.0])
    wsd = OptimizerConfig(
        lr=2.0, lr_scheduler="wsd", lr_warmup_steps=2, total_steps=9, lr_decay_steps=4, min_lr_ratio=0.2
    )
    expected = [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.6, 1.2, 0.8, 0.4, 0.4]
    assert [learning_rate(wsd, step) for step in range(11)] == pytest.approx(expected)


def test_wsd_requires_valid_decay_steps():
    for steps in (None, 0, 9):
        with pytest.raises(ValueError, match=r"lr_decay_steps between 1 and .* \(8\)"):
            OptimizerConfig(lr_scheduler="wsd", lr_warmup_steps=2, total_steps=10, lr_decay_steps=steps)


def named(*shapes):
    torch.manual_seed(0)
    return [(f"{name}", torch.nn.Parameter(torch.randn(shape))) for name, shape in shapes]


def test_adamw_with_groups_equals_torch_with_the_same_groups():
    ours = named(("a.weight", (5, 3)), ("a.bias", (5,)), ("norm.weight", (3,)), ("head.weight", (2, 3)))
    copies = [torch.nn.Parameter(weight.detach().clone()) for _, weight in ours]
    config = OptimizerConfig(
        lr=0.1,
        weight_decay=0.2,
        decay_norms_and_biases=False,
        param_groups=(ParamGroup(pattern="head.*", lr_ratio=3.0), ParamGroup(pattern="norm.*", weight_decay=0.5)),
    )
    optimizer = build_adamw(ours, config)
    groups = [
        {"params": [copies[0]], "weight_decay": 0.2, "lr": 0.1},
        {"params": [copies[1]], "weight_decay": 0.0, "lr": 0.1},
        {"params": [copies[2]], "weight_decay": 0.5, "lr": 0.1},
        {"params": [copies[3]], "weight_decay": 0.2, "lr": 0.1 * 3.0},
    ]
    plain = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, foreach=False)
    for _ in range(3):
        for (_, weight), copy in zip(ours, copies, strict=True):
            weight.grad = torch.randn_like(weight)
            copy.grad = weight.grad.clone()
        optimizer.step()
        plain.step()
    for (_, weight), copy in zip(ours, copies, strict=True):
        torch.testing.assert_close(weight, copy, rtol=1e-6, atol=1e-7)


def test_param_groups_merge_and_unmatched_pattern_is_rejected():
    params = named(("a.weight", (2, 2)), ("b.weight", (2, 2)), ("experts.bias", (4, 2)))
    assert [len(group["params"]) for group in group_params(params, OptimizerConfig())] == [3]
    exempt = group_params(params, OptimizerConfig(decay_norms_and_biases=False))
    assert [(len(group["params"]), group["weight_decay"]) for group in exempt] == [(2, 0.01), (1, 0.0)]
    with pytest.raises(ValueError, match=r"lm_head.* matches no trainable parameter.*for example, a.weight"):
        group_params(params, OptimizerConfig(param_groups=(ParamGroup(pattern="lm_head*"),)))
    with pytest.raises(ValueError, match="no parameter of the model is trainable"):
        build_adamw([("x", torch.nn.Parameter(torch.ones(2), requires_grad=False))], OptimizerConfig())


def spoiled(output, micro_batch, normalizer):
    loss, metrics = policy_like_loss(output, micro_batch, normalizer)
    return loss * (torch.inf if torch.distributed.get_rank() == 1 else 1.0), metrics


def norm_beyond_float32(engine, rows):
    """Return the error for a gradient with finite elements and an infinite sum of squares."""

    def large(output, micro_batch, normalizer):
        loss, metrics = policy_like_loss(output, micro_batch, normalizer)
        return loss * 1e25, metrics

    with engine.train_mode():
        engine.forward_backward_batch(rows, large, calculate_entropy=True)
        try:
            return engine.optimizer_step()
        except RuntimeError as error:
            return str(error)


def run_nonfinite(path, batch, nonfinite, folder, backend):
    engine = build_engine(path, backend=backend, optimizer={"lr": 1e-2, "nonfinite": nonfinite})
    rows, before, out = shard(engine, batch), weights_of(engine), []
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("tidemill_engines.base").addHandler(handler)
    for _ in range(2):
        try:
            out.append(engine.train_batch(rows, spoiled, calculate_entropy=True)["grad_nonfinite"])
        except RuntimeError as error:
            out.append(str(error))
    out.append(norm_beyond_float32(engine, rows))
    unchanged = all(torch.equal(weight, before[name]) for name, weight in weights_of(engine).items())
    state = not any((value != 0).any() for _, state in engine.optimizer.state.items() for value in state.values())
    engine.save_checkpoint(folder / nonfinite)
    skipped = engine.skipped_steps
    engine.load_checkpoint(folder / nonfinite)
    assert engine.skipped_steps == skipped
    with engine.train_mode():
        assert engine.grad_norm() == 0
    good = engine.train_batch(rows, policy_like_loss, calculate_entropy=True)
    engine.close()
    return out, unchanged and state, skipped, records, good["grad_norm"]


@pytest.mark.parametrize(("backend", "name"), [("fsdp2", "model.embed_tokens.weight"), ("megatron", "decoder.layers.")])
def test_nonfinite_gradient_is_skipped_or_raised(tmp_path, backend, name):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batch = make_batch(6, seed=3)
    skip = run_ranks(run_nonfinite, 2, path, batch, "skip", tmp_path, backend)
    for rank, (out, unchanged, skipped, records, norm) in enumerate(skip):
        assert (out, unchanged, skipped) == ([1.0, 1.0, torch.inf], True, 3)
        assert len(records) == (3 if rank == 0 else 0)
        assert norm > 0
    assert f"skipped step 1 (2 so far): its gradient is not finite in rank 0: {name}" in skip[0][3][1]
    assert "its gradient is not finite in the sum of its squares only" in skip[0][3][2]
    for out, unchanged, skipped, _, norm in run_ranks(run_nonfinite, 2, path, batch, "raise", tmp_path, backend):
        assert "the gradient of step 0 has the norm" in out[0]
        assert f"not finite in rank 0: {name}" in out[0]
        assert out[0] == out[1]
        assert "not finite in the sum of its squares only" in out[2]
        assert (unchanged, skipped, norm) == (True, 0, skip[0][4])


def run_frozen(path, batch):
    engine = build_engine(path, model={"frozen": ("model.embed_tokens.*", "*.mlp.*")}, optimizer={"lr": 1e-2})
    before = weights_of(engine)
    engine.train_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True)
    changed = {name for name, weight in weights_of(engine).items() if not torch.equal(weight, before[name])}
    state = len(engine.optimizer.state)
    engine.close()
    with pytest.raises(ValueError, match=r"frozen: 'lm_\*x' matches no parameter; names are, for example, model."):
        build_engine(path, model={"frozen": ("lm_*x",)})
    return set(before), changed, state


def test_frozen_parameters_have_no_optimizer_state(tmp_path):
    path = tiny_model(tmp_path / "model", "llama", vocab_size=VOCAB)
    for names, changed, state in run_ranks(run_frozen, 2, path, make_batch(6, seed=4)):
        frozen = {name for name in names if ".mlp." in name or "embed_tokens" in name}
        assert len(frozen) == 7
        assert changed == names - frozen
        assert state == len(changed)


def run_steps_and_count(path, settings):
    engine = build_engine(path, **settings)
    counts = []
    for _ in range(3):
        train(engine, [0, 1])
        gc.collect()
        counts.append(sum(not isinstance(each, torch.Tensor) for each in gc.get_objects()))
    engine.close()
    return counts


@pytest.mark.parametrize("settings", [{}, {"backend": "megatron"}], ids=str)
def test_steps_keep_no_objects(tmp_path, settings):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    for _, *counts in run_ranks(run_steps_and_count, 2, path, settings):  # the first steps fill caches
        assert abs(counts[1] - counts[0]) < 10, counts  # fewer than there are parameters
