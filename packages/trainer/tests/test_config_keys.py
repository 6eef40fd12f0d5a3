import pytest
from tidemill_trainer.algorithm_options import option_names
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, load_config
from tidemill_trainer.config_keys import RENAMED, SHORT, paths_of


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("algorithm.use_kl_in_reward", r"in the reward has algorithm\.kl_coef > 0"),
        ("actor.kl_loss_coef", r"use algorithm\.kl_loss_coef"),
        ("actor.clip_ratio_high", r"use algorithm\.clip_ratio_high"),
        ("algorithm.clip_ratio_hihg", r"did you mean algorithm\.clip_ratio_high\?"),
        ("trainer.critic_warmup", r"use critic\.warmup_steps"),
        ("data.max_response_length", r"use rollout\.response_length"),
        ("trainer.total_training_steps", r"use trainer\.total_steps"),
        ("trainer.total_epochs", r"in steps, with trainer\.total_steps"),
        ("actor.grad_clip", r"use optimizer\.clip_grad"),
        ("rollout.gpu_memory_utilization", r"use rollout\.mem_fraction_static"),
        ("rollout.tensor_model_parallel_size", r"did you mean rollout\.tensor_parallel_size\?"),
        ("rollout.tp", r"use rollout\.tensor_parallel_size"),
        ("engine.tp_size", r"use engine\.tensor_model_parallel_size"),
        ("actor.lr", r"did you mean critic\.optimizer\.lr or optimizer\.lr or warmup\.lr\?"),
        ("trainer.temprature", r"did you mean rollout\.temperature\?"),
        ("algorithm.use_wings", r"known keys: adv_estimator, policy_loss, .*, clip_ratio_high"),
        ("lora.rank", r"known keys: model, data.*, weight_update$"),
        ("dpo.rank", r"known keys: model, data, .*; this one is a key of `tidemill sft`"),
        ("data.max_length", r"known keys: .*; this one is a key of `tidemill sft`"),
        ("critic.optim", r"critic\.optimizer for the critic"),
        ("reward_model.model", r"is its key path, such as reward_model\.path"),
        ("actor.fsdp_config", r"keys of the section engine"),
        ("async_training.rank", r"use rollout\.max_staleness"),
        ("distillation.rank", r"use the section teacher"),
    ],
)
def test_unknown_key_is_rejected_with_a_suggestion(config_file, key, advice):
    with pytest.raises(ConfigError, match=rf"^unknown config key {key.removesuffix('.rank')}; .*{advice}"):
        load_config(config_file, [f"{key}=1"])


def test_short_name_in_a_file_is_rejected_with_the_long_name(config_file):
    config_file.write_text('[model]\npath = "m"\n[engine]\ntp = 2\n')
    with pytest.raises(ConfigError, match=r"engine\.tp; use engine\.tensor_model_parallel_size in a file"):
        load_config(config_file)


def test_suggestions_for_verl_keys_are_existing_keys():
    keys = set(paths_of(Config)) | {f"algorithm.{name}" for name in option_names()}
    assert {name for names in RENAMED.values() for name in names} | set(SHORT.values()) <= keys
