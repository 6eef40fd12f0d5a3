"""Supervised distillation from the most probable tokens of a teacher, with real Ray actors and engines."""

import pytest
import torch
from tidemill_dataproto import ragged
from tidemill_testing import tiny_model
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

K, VOCAB = 4, 15
DISTILL = ["algorithm.adv_estimator=none", "algorithm.policy_loss=forward_kl_topk", f"teacher.topk={K}"]


@pytest.fixture
def teacher(tmp_path):
    """Override with the folder of a teacher that has other weights and layers than the policy."""
    return f"teacher.path={tiny_model(tmp_path / 'teacher', 'qwen2', vocab_size=VOCAB)}"


def updates(learner, rows, count):
    """Make updates on fixed rows; return their metrics."""
    trained, episodes = rows
    batch, _ = learner.add_advantages(learner.infer(trained), episodes)
    return [learner.update(batch, step)[1] for step in range(1, count + 1)]


def plain_topk(path, batch, temperature):
    """The most probable ids [N, K] of plain transformers and their log-probs, row by row."""
    model, log_probs = AutoModelForCausalLM.from_pretrained(path).eval(), []
    with torch.no_grad():
        for ids, response in zip(batch["input_ids"].unbind(), batch["responses"].unbind(), strict=True):
            logits = model(input_ids=ids[None]).logits[0, -len(response) - 1 : -1] / temperature
            log_probs.append(logits.log_softmax(-1))
    return torch.cat(log_probs).topk(K)


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_policy_learns_the_distribution_of_the_teacher(learner, rows, teacher, backend):
    made = learner(*DISTILL, teacher, f"engine.backend={backend}", "rollout.temperature=0.7", "optimizer.lr=1e-2")
    batch = made.infer(rows[0])
    expected = plain_topk(teacher.removeprefix("teacher.path="), rows[0], 0.7)
    assert batch["topk_ids"].dtype == torch.int32
    assert torch.equal(ragged.values(batch["topk_ids"]).long(), expected.indices)
    torch.testing.assert_close(ragged.values(batch["teacher_topk_log_probs"]), expected.values, rtol=1e-4, atol=1e-4)
    steps = updates(made, rows, 12)
    assert steps[0]["actor/pg_loss"] > 0.1
    assert steps[-1]["actor/pg_loss"] < 0.5 * steps[0]["actor/pg_loss"]
    assert steps[-1]["actor/teacher_topk_mass"] == steps[0]["actor/teacher_topk_mass"]
    mass = torch.tensor([step["actor/topk_mass"] for step in (steps[0], steps[-1])])
    distance = (mass - steps[0]["actor/teacher_topk_mass"]).abs()
    assert distance[1] < distance[0]


def test_policy_that_equals_the_teacher_has_no_loss_and_no_gradient(learner, rows, assets):
    path = assets[0].replace("model.path", "teacher.path")
    shared = learner(*DISTILL, path)
    own = learner(*DISTILL, path, "actor.num_workers=1", "teacher.num_workers=1", "algorithm.bypass_mode=true")
    [metrics] = updates(shared, rows, 1)
    rows[0].batch["rollout_log_probs"] = ragged.like(-torch.ones(64), rows[0]["responses"])
    [of_own] = updates(own, rows, 1)
    for found in (metrics, of_own):
        assert abs(found["actor/pg_loss"]) < 1e-6
        assert found["actor/grad_norm"] < 1e-5
        assert found["actor/topk_mass"] == pytest.approx(found["actor/teacher_topk_mass"], abs=1e-6)


def test_teacher_with_processes_of_its_own_gives_the_same_loss(learner, rows, teacher):
    shared = updates(learner(*DISTILL, teacher, "actor.num_workers=1"), rows, 2)
    own = updates(learner(*DISTILL, teacher, "actor.num_workers=1", "teacher.num_workers=1"), rows, 2)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/topk_mass"):
        assert [step[name] for step in own] == [step[name] for step in shared], name
