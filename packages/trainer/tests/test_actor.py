"""The models of the training processes, with real Ray actors and engines."""

import numpy as np
import pytest
import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_testing import tiny_reward_model
from transformers import AutoModelForSequenceClassification

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_reference_and_critic_share_the_processes_of_the_policy(learner, rows, tmp_path, backend):
    trained, episodes = rows
    made = learner(
        f"engine.backend={backend}",
        "algorithm.adv_estimator=gae",
        "algorithm.kl_loss_coef=0.1",
        "critic.optimizer.lr=1e-3",
        "critic.warmup_steps=1",
    )
    before = made.infer(trained)
    assert torch.equal(ragged.values(before["ref_log_prob"]), ragged.values(before["old_log_probs"]))
    assert not ragged.values(before["values"]).any()  # a new head is zero

    metrics = []
    for step in (1, 2, 3):
        batch, _ = made.add_advantages(made.infer(trained), episodes)
        metrics.append(made.update(batch, step)[1])
    assert "actor/pg_loss" not in metrics[0]  # the critic alone
    assert all(each["timing_s/update_critic"] > 0 for each in metrics)
    assert torch.equal(ragged.values(batch["ref_log_prob"]), ragged.values(before["ref_log_prob"]))
    assert metrics[1]["actor/kl_loss"] == 0.0
    assert metrics[2]["actor/kl_loss"] > 0.0
    assert metrics[2]["critic/vf_loss"] < metrics[0]["critic/vf_loss"]

    after = made.infer(trained)
    assert torch.equal(ragged.values(after["ref_log_prob"]), ragged.values(before["ref_log_prob"]))
    assert not torch.equal(ragged.values(after["old_log_probs"]), ragged.values(before["old_log_probs"]))
    made.save_checkpoint(tmp_path / "checkpoint")
    made.update(made.add_advantages(after, episodes)[0], 4)
    made.load_checkpoint(tmp_path / "checkpoint")
    restored = made.infer(trained)
    for name in ("old_log_probs", "values", "ref_log_prob"):
        assert torch.equal(ragged.values(restored[name]), ragged.values(after[name])), name


def _rows_of(length, count=16):
    """Rows with prompts of 6 tokens and responses that fill them up to `length` tokens, and their episodes."""
    generator = torch.Generator().manual_seed(length)
    sizes = {"prompts": [6] * count, "responses": [length - 6] * count}
    columns = {
        name: ragged.ragged(torch.randint(3, 15, (sum(each),), generator=generator), each)
        for name, each in sizes.items()
    }
    columns |= {
        "input_ids": ragged.concat_rows(columns["prompts"], columns["responses"]),
        "response_mask": ragged.like(torch.ones(sum(sizes["responses"])), columns["responses"]),
        "episode": torch.arange(count),
    }
    uid = np.array([f"{number // 4}" for number in range(count)], dtype=object)
    rewards = torch.rand(count, generator=generator)
    episodes = DataProto.from_dict({"episode": torch.arange(count), "scores": rewards}, {"uid": uid})
    return DataProto.from_dict(columns), episodes


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_rows_at_the_limit_in_one_step_and_of_10_tokens_in_the_next(learner, backend):
    limit = 64  # also the tokens of a micro-batch, so each of the long rows is one
    sizes = [f"engine.max_token_len_per_gpu={limit}", f"rollout.response_length={limit - 16}", "actor.ppo_epochs=2"]
    made = learner(f"engine.backend={backend}", *sizes)
    long, short = _rows_of(limit), _rows_of(10)
    before = made.infer(short[0])["old_log_probs"]
    made.infer(long[0])
    assert torch.equal(ragged.values(made.infer(short[0])["old_log_probs"]), ragged.values(before))
    for step, (rows, episodes) in enumerate([long, short, long, short], start=1):
        batch, _ = made.add_advantages(made.infer(rows), episodes)
        metrics = made.update(batch, step)[1]
        assert 0 < metrics["actor/grad_norm"] < float("inf")
        assert torch.equal(ragged.lengths(batch["old_log_probs"]), ragged.lengths(rows["responses"]))


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_reward_model_has_the_scores_of_transformers(learner, rows, tmp_path, backend):
    trained, _ = rows
    path = tiny_reward_model(tmp_path / "reward_model", "qwen2", vocab_size=15)
    made = learner(f"engine.backend={backend}", f"reward_model.path={path}")
    batch = made.infer(trained)
    torch.testing.assert_close(batch["rm_scores"], plain_scores(path, trained), atol=1e-5, rtol=0)
    assert torch.equal(made.score(trained)["rm_scores"], batch["rm_scores"])  # as in a validation
    assert "values" not in batch.batch


def plain_scores(path, batch):
    """Scores of the rows in plain transformers, one by one and without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return torch.stack([model(input_ids=row[None]).logits[0, 0] for row in batch["input_ids"].unbind()])


def test_reference_of_an_adapter_is_the_model_without_it(learner, rows):
    trained, episodes = rows
    made = learner("algorithm.kl_loss_coef=0.1", "model.lora.rank=2")
    before = made.infer(trained)
    before, _ = made.update(made.add_advantages(before, episodes)[0], 1)
    after, _ = made.update(made.add_advantages(made.infer(trained), episodes)[0], 2)
    torch.testing.assert_close(ragged.values(after["ref_log_prob"]), ragged.values(before["old_log_probs"]))
    assert not torch.equal(ragged.values(after["old_log_probs"]), ragged.values(before["old_log_probs"]))


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_on_policy_update_equals_one_with_log_probs_of_a_pass_before_it(learner, rows, backend):
    """The second learner computes them before its update, because its correction reads them."""
    trained, episodes = rows
    made = learner(f"engine.backend={backend}")
    batch = made.infer(trained)
    assert "old_log_probs" not in batch.batch
    after, metrics = made.update(made.add_advantages(batch, episodes)[0], 1)
    other = learner(f"engine.backend={backend}", "algorithm.rollout_is=token", "algorithm.rollout_is_threshold=1e9")
    inferred = other.infer(trained)
    torch.testing.assert_close(
        ragged.values(after["old_log_probs"]), ragged.values(inferred["old_log_probs"]), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(ragged.values(after["entropy"]), ragged.values(inferred["entropy"]), atol=1e-6, rtol=0)
    assert metrics["actor/ppo_kl"] == 0.0
