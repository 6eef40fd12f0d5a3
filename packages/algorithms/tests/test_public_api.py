import tidemill_algorithms


def test_public_names_are_unchanged():
    assert tidemill_algorithms.__all__ == [
        "ADV_ESTIMATORS",
        "ActorLoss",
        "AdaptiveKLController",
        "CriticLoss",
        "FixedKLController",
        "Groups",
        "POLICY_LOSSES",
        "has_signal",
        "kl_penalty",
        "overlong_penalty",
        "rollout_correction",
        "token_rewards",
        "token_weights",
        "whiten",
    ]
    assert all(name in vars(tidemill_algorithms) for name in tidemill_algorithms.__all__)


def test_registered_names_are_unchanged():
    assert sorted(tidemill_algorithms.ADV_ESTIMATORS) == [
        "gae",
        "gdpo",
        "grpo",
        "none",
        "opd",
        "opo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "rloo",
        "vapo",
    ]
    assert sorted(tidemill_algorithms.POLICY_LOSSES) == [
        "cispo",
        "dppo_tv",
        "forward_kl_topk",
        "geo_mean",
        "gspo",
        "policy_gradient",
        "sapo",
        "vanilla",
    ]
