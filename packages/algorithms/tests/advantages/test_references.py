"""Each estimator against a float64 reference, a loop over episodes or tokens written from the paper."""

from statistics import mean, stdev

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from random_batches import random_batch, row_counts, seeds
from tidemill_algorithms import ADV_ESTIMATORS
from tidemill_dataproto import DataProto, ragged


class Rows:
    """A batch as lists: rows, episodes and groups."""

    def __init__(self, batch):
        self.masks = [row.bool().tolist() for row in batch["response_mask"].unbind()]
        self.rewards = batch["rewards"].double().tolist()
        self.episode, self.uid = batch["episode"].tolist(), batch["uid"].tolist()
        self.reward = dict(zip(self.episode, self.rewards, strict=True))
        self.problem = dict(zip(self.episode, self.uid, strict=True))

    def group(self, episode, values=None):
        """Return the values of all episodes of the same problem, by default their rewards."""
        values = self.reward if values is None else values
        return [values[other] for other in values if self.problem[other] == self.problem[episode]]

    def tokens(self, per_episode):
        return [
            [per_episode[episode] * is_trained for is_trained in mask]
            for episode, mask in zip(self.episode, self.masks, strict=True)
        ]

    def whiten(self, rows):
        trained = [x for row, mask in zip(rows, self.masks, strict=True) for x, m in zip(row, mask, strict=True) if m]
        center = mean(trained) if trained else 0.0
        scale = (stdev(trained) ** 2 if len(trained) > 1 else 0.0) + 1e-8
        return [
            [(x - center) / scale**0.5 * m for x, m in zip(row, mask, strict=True)]
            for row, mask in zip(rows, self.masks, strict=True)
        ]


def standardized(group, value):
    return (value - mean(group)) / ((stdev(group) if len(group) > 1 else 0.0) + 1e-6)


def grpo(batch, rows):
    return rows.tokens({e: standardized(rows.group(e), r) for e, r in rows.reward.items()})


def dr_grpo(batch, rows):
    return rows.tokens({e: r - mean(rows.group(e)) for e, r in rows.reward.items()})


def rloo(batch, rows):
    def advantage(episode, reward):
        group = rows.group(episode)
        return reward - (sum(group) - reward) / (len(group) - 1) if len(group) > 1 else 0.0

    return rows.tokens({e: advantage(e, r) for e, r in rows.reward.items()})


def opo(batch, rows):
    lengths = dict.fromkeys(rows.episode, 0)
    for episode, mask in zip(rows.episode, rows.masks, strict=True):
        lengths[episode] += sum(mask)
    weighted = {e: lengths[e] * r for e, r in rows.reward.items()}
    return rows.tokens(
        {e: r - sum(rows.group(e, weighted)) / max(sum(rows.group(e, lengths)), 1) for e, r in rows.reward.items()}
    )


def gdpo(batch, rows):
    components = dict(zip(rows.episode, batch["reward_components"].double().tolist(), strict=True))
    total = dict.fromkeys(components, 0.0)
    for k, weight in enumerate([1.0, 0.25]):
        reward = {e: values[k] for e, values in components.items()}
        total = {e: total[e] + weight * standardized(rows.group(e, reward), reward[e]) for e in total}
    return rows.tokens({e: standardized(list(total.values()), value) for e, value in total.items()})


def reinforce_plus_plus_baseline(batch, rows):
    return rows.whiten(dr_grpo(batch, rows))


def returns_of(rows, gamma):
    """Return token returns; the outcome is the reward of the last trained token."""
    result = []
    for mask, reward in zip(rows.masks, rows.rewards, strict=True):
        last = max((t for t, m in enumerate(mask) if m), default=-1)
        running, row = 0.0, []
        for t, m in reversed(list(enumerate(mask))):
            running = (reward if t == last else 0.0) + gamma * running if m else running
            row.append(running * m)
        result.append(row[::-1])
    return result


def remax(batch, rows):
    baselines = batch["baseline_rewards"].double().tolist()
    return [
        [(x - b) * m for x, m in zip(row, mask, strict=True)]
        for row, mask, b in zip(returns_of(rows, 1.0), rows.masks, baselines, strict=True)
    ]


def reinforce_plus_plus(batch, rows):
    return rows.whiten(returns_of(rows, 0.9))


def gae_rows(batch, rows, gamma, lam_of_length):
    """Carry the next value and advantage over masked tokens; return advantages, and their sums with the values."""
    advantages, returns = [], []
    for mask, values, reward in zip(rows.masks, batch["values"].unbind(), rows.rewards, strict=True):
        last = max((t for t, m in enumerate(mask) if m), default=-1)
        next_value = next_advantage = 0.0
        row, sums = [0.0] * len(mask), [0.0] * len(mask)
        for t in reversed(range(len(mask))):
            if mask[t]:
                delta = (reward if t == last else 0.0) + gamma * next_value - float(values[t])
                row[t] = next_advantage = delta + gamma * lam_of_length(sum(mask)) * next_advantage
                next_value = float(values[t])
                sums[t] = row[t] + next_value
        advantages.append(row)
        returns.append(sums)
    return advantages, returns


def gae(batch, rows):
    return rows.whiten(gae_rows(batch, rows, 0.99, lambda length: 0.95)[0])


def gae_returns(batch, rows):
    return gae_rows(batch, rows, 0.99, lambda length: 0.95)[1]


def vapo(batch, rows):
    return rows.whiten(gae_rows(batch, rows, 0.99, lambda length: max(0.0, 1 - 1 / (0.2 * length)))[0])


def vapo_returns(batch, rows):
    return gae_rows(batch, rows, 0.99, lambda length: 0.9)[1]


CASES = [
    (grpo, "grpo", {}, "advantages"),
    (dr_grpo, "grpo", {"norm_adv_by_std_in_grpo": False}, "advantages"),
    (rloo, "rloo", {}, "advantages"),
    (opo, "opo", {}, "advantages"),
    (gdpo, "gdpo", {"gdpo_reward_weights": [1.0, 0.25]}, "advantages"),
    (reinforce_plus_plus_baseline, "reinforce_plus_plus_baseline", {}, "advantages"),
    (remax, "remax", {}, "advantages"),
    (reinforce_plus_plus, "reinforce_plus_plus", {"gamma": 0.9}, "advantages"),
    (gae, "gae", {"gamma": 0.99, "lam": 0.95}, "advantages"),
    (gae_returns, "gae", {"gamma": 0.99, "lam": 0.95}, "returns"),
    (vapo, "vapo", {"gamma": 0.99, "lam_critic": 0.9, "lam_alpha": 0.2}, "advantages"),
    (vapo_returns, "vapo", {"gamma": 0.99, "lam_critic": 0.9, "lam_alpha": 0.2}, "returns"),
]


@pytest.mark.parametrize(("reference", "name", "options", "column"), CASES, ids=[case[0].__name__ for case in CASES])
@settings(max_examples=30, deadline=None)
@given(seed=seeds, num_rows=row_counts)
def test_estimator_equals_a_float64_reference(reference, name, options, column, seed, num_rows):
    batch = random_batch(seed, num_rows)
    result = ADV_ESTIMATORS[name](batch, **options)[column]
    expected = np.array([x for row in reference(batch, Rows(batch)) for x in row])
    assert result.dtype == torch.float32
    assert torch.equal(ragged.offsets(result), ragged.offsets(batch["response_mask"]))
    np.testing.assert_allclose(ragged.values(result).numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATORS))
@settings(max_examples=30, deadline=None)
@given(seed=seeds, num_rows=row_counts)
def test_order_of_rows_and_values_at_masked_tokens_have_no_effect(name, seed, num_rows):
    batch = random_batch(seed, num_rows)
    expected = ADV_ESTIMATORS[name](batch)
    order = np.random.default_rng(seed).permutation(num_rows)
    is_masked = ~ragged.values(batch["response_mask"]).bool()
    garbage = ragged.values(batch["values"]).masked_fill(is_masked, float("nan"))
    changed = batch.select([name for name in batch.batch.keys() if name != "values"])  # noqa: SIM118
    changed = changed.union(DataProto.from_dict({"values": ragged.like(garbage, batch["response_mask"])}))
    result = ADV_ESTIMATORS[name](changed.reorder(order))
    for column, values in expected.items():
        reordered = ragged.index_rows(values, torch.from_numpy(order))
        torch.testing.assert_close(ragged.values(result[column]), ragged.values(reordered), rtol=1e-6, atol=1e-6)
        assert not ragged.values(values)[is_masked].any()
