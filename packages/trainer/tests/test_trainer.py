import pytest
from tidemill_engines.config import OptimizerConfig
from tidemill_trainer.trainer import warmup_optimizer


@pytest.mark.parametrize(
    "schedule",
    [
        {"lr_scheduler": "constant"},
        {"lr_scheduler": "cosine", "total_steps": 9, "min_lr_ratio": 0.1},
        {"lr_scheduler": "wsd", "total_steps": 9, "lr_decay_steps": 4},
    ],
)
def test_warm_up_has_the_optimizer_with_another_learning_rate_and_no_decay(schedule):
    optimizer = OptimizerConfig(weight_decay=0.3, lr_warmup_steps=5, **schedule)
    assert warmup_optimizer(optimizer, 0.5) == OptimizerConfig(lr=0.5, weight_decay=0.3, lr_warmup_steps=5)
