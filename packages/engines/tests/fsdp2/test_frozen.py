"""Training of a head on a frozen backbone."""

import pytest
import torch
from engine_cases import (
    VOCAB,
    build_engine,
    make_batch,
    plain_model,
    plain_policy_like_loss,
    shard,
    trained_on,
    weights_of,
)
from tidemill_testing import run_ranks, tiny_model
from value_cases import value_loss

FROZEN = {"frozen": ("model.*",)}


def run_frozen(path, batch):
    results = []
    for reshard in (True, False):
        engine = build_engine(path, model=FROZEN, reshard_after_forward=reshard)
        results.append(trained_on(engine, [batch]))
        engine.close()
    values = build_engine(path, model=FROZEN, model_type="value_model")
    before = weights_of(values)["score.weight"].clone()
    norm = values.train_batch(shard(values, batch), value_loss)["grad_norm"]
    change = weights_of(values)["score.weight"] - before
    values.close()
    return results, norm, change.abs().max().item()


def test_head_is_trained_although_nothing_before_it_is(tmp_path):
    path, batch = tiny_model(tmp_path / "model", vocab_size=VOCAB, tie_word_embeddings=False), make_batch(9)
    model = plain_model(path)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.model.requires_grad_(False)
    plain_policy_like_loss(model, batch)[0].backward()
    norm = model.lm_head.weight.grad.norm().item()
    for results, norm_of_values, change in run_ranks(run_frozen, 2, path, batch):
        for [metrics], weights in results:
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
            changed = [name for name, weight in weights.items() if not torch.equal(weight, before[name])]
            assert changed == ["lm_head.weight"]
        assert norm_of_values > 0
        assert change > 0
