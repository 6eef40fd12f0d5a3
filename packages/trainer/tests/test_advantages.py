import pytest
import torch
from tidemill_trainer.advantages import frac_zero_std_groups, grpo_advantages


@pytest.mark.parametrize(
    ("rewards", "grpo", "dr_grpo"),
    [
        ([1.0, 0, 0, 0], [1.5, -0.5, -0.5, -0.5], [0.75, -0.25, -0.25, -0.25]),
        ([1.0, 1, 0, 0], [0.866025, 0.866025, -0.866025, -0.866025], [0.5, 0.5, -0.5, -0.5]),
        ([1.0, 1, 1, 1], [0.0, 0, 0, 0], [0.0, 0, 0, 0]),
    ],
)
def test_advantages_of_one_group(rewards, grpo, dr_grpo):
    scores, uid = torch.tensor(rewards), ["a"] * 4
    torch.testing.assert_close(grpo_advantages(scores, uid, norm_by_std=True), torch.tensor(grpo), atol=1e-5, rtol=0)
    torch.testing.assert_close(grpo_advantages(scores, uid, norm_by_std=False), torch.tensor(dr_grpo))


def test_advantages_do_not_depend_on_the_order_of_rows():
    torch.manual_seed(0)
    scores, uid = torch.rand(24), [f"{n % 5}" for n in range(24)]
    whole = grpo_advantages(scores, uid, norm_by_std=True)
    order = torch.randperm(24)
    permuted = grpo_advantages(scores[order], [uid[i] for i in order], norm_by_std=True)
    torch.testing.assert_close(permuted, whole[order])
    for name in set(uid):
        rows = [i for i, u in enumerate(uid) if u == name]
        alone = scores[rows]
        expected = (alone - alone.mean()) / (alone.std() + 1e-6)
        torch.testing.assert_close(whole[rows], expected)


@pytest.mark.parametrize(("score", "n"), [(0.7, 8), (0.7, 16), (100.1, 8), (1 / 3, 5)])
def test_equal_scores_that_float32_rounds_have_zero_advantage(score, n):
    scores, uid = torch.full((n,), score), ["a"] * n
    assert grpo_advantages(scores, uid, norm_by_std=True).abs().max() < 1e-6
    assert frac_zero_std_groups(scores, uid) == 1.0


def test_group_of_one_has_zero_advantage():
    assert grpo_advantages(torch.tensor([3.0, 1.0]), ["a", "b"], norm_by_std=True).tolist() == [0.0, 0.0]


def test_fraction_of_groups_with_equal_scores():
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    assert frac_zero_std_groups(scores, ["a", "a", "b", "b", "c", "c"]) == pytest.approx(2 / 3)
