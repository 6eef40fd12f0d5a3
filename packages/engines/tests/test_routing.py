"""The loss that keeps experts in even use: transformers' own of each row, in any layout."""

import pytest
import torch
from engine_cases import (
    OPTIMIZER,
    VOCAB,
    build_engine,
    make_batch,
    plain_log_probs,
    plain_model,
    relative_error,
    shard,
    weights_of,
)
from tidemill_engines import sft_loss
from tidemill_testing import run_ranks, tiny_model

COEFFICIENT = 0.3
LAYOUTS = [
    {"max_token_len_per_gpu": 40},
    {"micro_batch_size_per_gpu": 1, "reshard_after_forward": False},
    {"max_token_len_per_gpu": 40, "gradient_checkpointing": True},
]


def plain_balanced_training(path, batches):
    """Row by row; a row alone is what transformers' loss is the mean of."""
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
    with pytest.raises(ValueError, match="needs whole rows"):
        build_engine(path, model={"router_aux_loss_coef": 1.0}, ulysses_sequence_parallel_size=2)
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
                if ".experts." not in name:  # the engine gives those by the names of the checkpoint
                    assert relative_error(actual[name], weight) < 1e-4, (layout, name)


def run_refused(path):
    with pytest.raises(ValueError, match="is for mixtures of experts; a qwen3 is none"):
        build_engine(path, model={"router_aux_loss_coef": 1.0})
    return True


def test_a_dense_model_has_no_experts_to_balance(tmp_path):
    assert run_ranks(run_refused, 2, tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)) == [True, True]
