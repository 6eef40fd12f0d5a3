"""Load-balancing loss and router logits against transformers, row by row."""

import pytest
import torch
from engine_cases import (
    OPTIMIZER,
    VOCAB,
    build_engine,
    make_batch,
    pad_batch,
    plain_log_probs,
    plain_model,
    relative_error,
    shard,
    weights_of,
)
from tidemill_dataproto import ragged
from tidemill_engines import sft_loss
from tidemill_testing import run_ranks, tiny_model

COEFFICIENT = 0.3
LAYOUTS = [
    {"max_token_len_per_gpu": 40},
    {"max_token_len_per_gpu": 20, "ulysses_sequence_parallel_size": 2},
    {"micro_batch_size_per_gpu": 2, "ulysses_sequence_parallel_size": 2, "gradient_checkpointing": True},
    {"micro_batch_size_per_gpu": 1, "reshard_after_forward": False},
    {"max_token_len_per_gpu": 40, "gradient_checkpointing": True},
]


def plain_balanced_training(path, batches):
    """Train row by row; transformers' loss is the mean over one row."""
    model = plain_model(path).train()
    settings = {name: value for name, value in OPTIMIZER.items() if name != "clip_grad"}
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **settings)
    history = []
    for batch in batches:
        masks = [mask.float() for mask in batch["response_mask"].unbind()]
        trained = [mask.any() for mask in masks]
        of_rows = [
            model(input_ids=ids[None], output_router_logits=True).aux_loss for ids in batch["input_ids"].unbind()
        ]
        router_loss = sum(loss for loss, is_trained in zip(of_rows, trained, strict=True) if is_trained) / sum(trained)
        log_probs = [log_probs for log_probs, _ in plain_log_probs(model, batch)]
        loss = -sum((row * mask).sum() for row, mask in zip(log_probs, masks, strict=True)) / sum(
            m.sum() for m in masks
        )
        loss = loss + COEFFICIENT * router_loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"])
        optimizer.step()
        history.append({"loss": loss.item(), "router_loss": router_loss.item(), "grad_norm": norm.item()})
    return history, {name: weight.detach() for name, weight in model.named_parameters()}


def run_balanced(path, batches):
    out = []
    for layout in LAYOUTS:
        checkpointing = layout.get("gradient_checkpointing", False)
        model = {"router_aux_loss_coef": COEFFICIENT, "gradient_checkpointing": checkpointing}
        engine_settings = {name: value for name, value in layout.items() if name != "gradient_checkpointing"}
        engine = build_engine(path, model=model, **engine_settings)
        history = [engine.train_batch(shard(engine, batch), sft_loss) for batch in batches]
        assert list(engine.infer_batch(shard(engine, batches[0])).batch.keys()) == ["log_probs"]
        out.append((history, weights_of(engine)))
        engine.close()
    return out


def test_balanced_training_equals_transformers_in_any_layout(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3_moe", vocab_size=VOCAB)
    batches = [make_batch(9, seed=1), make_batch(6, seed=2)]
    history, weights = plain_balanced_training(path, batches)
    for of_rank in run_ranks(run_balanced, 2, path, batches):
        for layout, (actual_history, actual) in zip(LAYOUTS, of_rank, strict=True):
            for metrics, expected in zip(actual_history, history, strict=True):
                assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4), layout
            for name, weight in weights.items():
                if ".experts." not in name:  # the engine exports experts by checkpoint names
                    assert relative_error(actual[name], weight) < 1e-4, (layout, name)


def z_loss(output, micro_batch, normalizer):
    """Compute the router z-loss of ST-MoE (arXiv:2202.08906, equation 5) at the trained tokens."""
    mask = ragged.values(micro_batch["response_mask"]).float()
    loss = (output.router_logits.logsumexp(-1).square().mean(-1) * mask).sum() / normalizer.num_tokens
    return loss, {}


def plain_router_logits(model, batch):
    """Compute the logits [L, E] of each response token at the token before it, in row order."""
    out = []
    for ids, response in zip(batch["input_ids"].unbind(), batch["responses"].unbind(), strict=True):
        logits = torch.stack(model(input_ids=ids[None], output_router_logits=True).router_logits, 1)
        out.append(logits[len(ids) - len(response) - 1 : -1][: len(response)])
    return torch.cat(out)


def run_router_logits(path, batch):
    out = []
    for layout in ({"max_token_len_per_gpu": 30}, {"ulysses_sequence_parallel_size": 2}):
        engine = build_engine(path, model={"output_router_logits": True}, **layout)
        own = shard(engine, batch)
        inferred = [engine.infer_batch(form)["router_logits"] for form in (own, pad_batch(own))]
        norm = engine.train_batch(own, z_loss)["grad_norm"]
        out.append((ragged.values(inferred[0]), inferred[1], norm))
        engine.close()
    return out


def test_router_logits_equal_transformers(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3_moe", vocab_size=VOCAB)
    batch = make_batch(9, seed=1)
    model = plain_model(path)
    expected = plain_router_logits(model, batch)
    assert expected.shape == (len(ragged.values(batch["responses"])), 2, 4)
    mask = ragged.values(batch["response_mask"]).float()
    ((expected.logsumexp(-1).square().mean(-1) * mask).sum() / mask.sum()).backward()
    norm = torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None]).norm().item()
    expected = expected.detach()
    is_token = pad_batch(batch)["attention_mask"][:, 12:].bool()
    results = run_ranks(run_router_logits, 2, path, batch)
    apart = [torch.cat([of_rank[0][form] for of_rank in results]) for form in (0, 1)]
    for logits, padded in (apart, *[of_rank[1][:2] for of_rank in results]):  # separate rows, or shared ones
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(padded[is_token], expected, rtol=1e-5, atol=1e-5)
        assert not padded[~is_token].any()
    for of_rank in results:
        assert [grad_norm for _, _, grad_norm in of_rank] == pytest.approx([norm, norm], rel=1e-5)


def value_loss(output, micro_batch, normalizer):
    error = (output.values - ragged.values(micro_batch["advantages"])).square()
    return (error * ragged.values(micro_batch["response_mask"])).sum() / normalizer.num_tokens, {}


def run_value_model(path, batch):
    out = []
    for layout in ({"max_token_len_per_gpu": 30}, {"ulysses_sequence_parallel_size": 2}):
        model = {"router_aux_loss_coef": COEFFICIENT}
        engine = build_engine(path, model_type="value_model", model=model, **layout)
        out.append(engine.train_batch(shard(engine, batch), value_loss))
        engine.close()
    return out


def test_router_loss_of_value_models(tmp_path):
    """With a head at zero, the gradient of all other weights comes from the routers."""
    path = tiny_model(tmp_path / "model", "qwen3_moe", vocab_size=VOCAB)
    batch = make_batch(9, seed=1)
    model = plain_model(path)
    head = torch.nn.Linear(64, 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    values, router_losses = [], []
    for ids, response in zip(batch["input_ids"].unbind(), batch["responses"].unbind(), strict=True):
        router_losses.append(model(input_ids=ids[None], output_router_logits=True).aux_loss)
        states = model.model(input_ids=ids[None]).last_hidden_state[0]
        values.append(head(states[len(ids) - len(response) - 1 : -1][: len(response)])[:, 0])
    masks = [mask.float() for mask in batch["response_mask"].unbind()]
    error = (torch.cat(values) - ragged.values(batch["advantages"])).square()
    trained = [loss for loss, mask in zip(router_losses, masks, strict=True) if mask.any()]
    router_loss = sum(trained) / len(trained)
    loss = (error * torch.cat(masks)).sum() / torch.cat(masks).sum() + COEFFICIENT * router_loss
    loss.backward()
    params = [*model.parameters(), *head.parameters()]
    norm = torch.cat([param.grad.flatten() for param in params if param.grad is not None]).norm()
    expected = {"loss": loss.item(), "router_loss": router_loss.item(), "grad_norm": norm.item()}
    for of_rank in run_ranks(run_value_model, 2, path, batch):
        for metrics in of_rank:
            assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def run_refused(path):
    with pytest.raises(ValueError, match=r"router_aux_loss_coef requires a MoE model whose .* qwen3 is not one"):
        build_engine(path, model={"router_aux_loss_coef": 1.0})
    with pytest.raises(ValueError, match="output_router_logits requires a MoE model"):
        build_engine(path, model={"output_router_logits": True})
    return True


def test_router_settings_require_moe_model(tmp_path):
    assert run_ranks(run_refused, 2, tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)) == [True, True]
