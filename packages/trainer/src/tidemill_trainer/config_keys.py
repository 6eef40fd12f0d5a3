"""The names of configuration keys, and suggestions for unknown ones."""

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from tidemill_engines import FSDP2Config, MegatronConfig

from tidemill_trainer.algorithm_config import AlgorithmConfig
from tidemill_trainer.algorithm_options import option_names
from tidemill_trainer.config import Config
from tidemill_trainer.sft.config import SFTConfig

BACKENDS: dict[str, type] = {"fsdp2": FSDP2Config, "megatron": MegatronConfig}
SHORT = {  # Megatron's short names, for the command line
    "engine.tp": "engine.tensor_model_parallel_size",
    "engine.pp": "engine.pipeline_model_parallel_size",
    "engine.vpp": "engine.virtual_pipeline_model_parallel_size",
    "engine.cp": "engine.context_parallel_size",
    "engine.ep": "engine.expert_model_parallel_size",
    "engine.etp": "engine.expert_tensor_parallel_size",
}
# Suggest only names that are at least this similar: a user who follows a wrong suggestion trains something else.
_CUTOFF = 0.75

_TENSOR_PARALLEL = ("rollout.tensor_parallel_size", "engine.tensor_model_parallel_size")
_ALGORITHM = [*(each.name for each in dataclasses.fields(AlgorithmConfig) if each.name != "options"), *option_names()]
RENAMED: dict[str, tuple[str, ...]] = {  # from the last part of verl's key to the keys here
    **{name: (f"algorithm.{name}",) for name in _ALGORITHM},  # some are in verl's section actor
    "max_response_length": ("rollout.response_length",),
    "filter_overlong_prompts": ("data.overlong_prompts",),
    "truncation": ("data.overlong_prompts",),
    "total_training_steps": ("trainer.total_steps", "optimizer.total_steps"),
    "experiment_name": ("trainer.name",),
    "default_local_dir": ("trainer.run_dir",),
    "default_hdfs_dir": ("trainer.checkpoint_dir",),
    "max_actor_ckpt_to_keep": ("trainer.max_ckpt_to_keep",),
    "nnodes": ("trainer.nnodes",),
    "n_gpus_per_node": ("actor.num_workers",),
    "strategy": ("engine.backend",),
    "clip_ratio": ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
    "loss_mode": ("algorithm.policy_loss",),
    "critic_warmup": ("critic.warmup_steps",),
    "grad_clip": ("optimizer.clip_grad",),
    "learning_rate": ("optimizer.lr",),
    "lr_scheduler_type": ("optimizer.lr_scheduler",),
    "warmup_style": ("optimizer.lr_scheduler",),
    "lr_warmup_steps_ratio": ("optimizer.lr_warmup_steps",),
    "ppo_max_token_len_per_gpu": ("engine.max_token_len_per_gpu",),
    "log_prob_max_token_len_per_gpu": ("engine.max_token_len_per_gpu",),
    "ppo_micro_batch_size_per_gpu": ("engine.micro_batch_size_per_gpu",),
    "log_prob_micro_batch_size_per_gpu": ("engine.micro_batch_size_per_gpu",),
    "enable_gradient_checkpointing": ("model.gradient_checkpointing",),
    "use_torch_compile": ("model.compile_layers",),
    "lora_rank": ("model.lora.rank",),
    "lora_alpha": ("model.lora.alpha",),
    "gpu_memory_utilization": ("rollout.mem_fraction_static",),
    "tp": _TENSOR_PARALLEL,
    "tp_size": _TENSOR_PARALLEL,
}
_ABSENT = {  # verl's keys that have no direct equivalent here
    "use_kl_loss": "a KL term in the loss has algorithm.kl_loss_coef > 0",
    "use_kl_in_reward": "a KL penalty in the reward has algorithm.kl_coef > 0",
    "kl_ctrl": "set algorithm.kl_coef and, to adapt it, algorithm.target_kl and algorithm.horizon",
    "ref": "use the section reference",
    "total_epochs": "the length of a run is set in steps, with trainer.total_steps",
    "use_dynamic_bsz": "micro-batches are formed by tokens, unless engine.micro_batch_size_per_gpu is set",
    "val_kwargs": "validation decodes greedily, with one response per problem",
    "resume_mode": "use the option --resume of the command to continue a run",
    "actor_rollout_ref": "use the sections model, engine, optimizer, actor and rollout",
    "optim": "use the section optimizer, or critic.optimizer for the critic",
    "fsdp_config": "use the keys of the section engine",
    "megatron": 'use the keys of the section engine, with engine.backend="megatron"',
    "async_training": "use rollout.max_staleness and rollout.partial_rollout",
    "distillation": "use the section teacher, with algorithm.policy_loss and algorithm.adv_estimator",
    "model": "the folder of the model of a role is its key path, such as reward_model.path",
    "overlong_buffer": "use algorithm.overlong_buffer_len and algorithm.overlong_penalty_factor",
    "custom_reward_function": 'use reward.function="path/file.py:name"',
}


def section_in(hint: Any) -> type | None:
    """Return the dataclass X of a field annotated with `X`, `X | None` or `tuple[X, ...]`; None for other types."""
    return next((kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind)), None)  # type: ignore[return-value]


def names_of(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def advice(root: type, where: tuple[str, ...], key: str, known: list[str]) -> str:
    """Return what to write instead of the unknown `key` of the section `where` of `root`, whose keys are `known`."""
    everywhere = sorted(
        {*paths_of(root)} | ({f"algorithm.{name}" for name in option_names()} if root is Config else set())
    )
    path = ".".join((*where, key))
    if where == ("algorithm",):
        known = _ALGORITHM
    if path in SHORT:
        return f"use {SHORT[path]} in a file; the short name works on the command line only"
    if renamed := [name for name in RENAMED.get(key, ()) if name in everywhere]:
        here = [name for name in renamed if name.startswith(f"{'.'.join(where)}.")]
        return f"use {' or '.join(here or renamed)}"
    if key in _ABSENT and root is Config:
        return _ABSENT[key]
    near = difflib.get_close_matches(key, known, n=1, cutoff=_CUTOFF)
    if near:
        return f"did you mean {'.'.join((*where, near[0]))}?"
    leaves = {name.rpartition(".")[2] for name in everywhere}
    near = difflib.get_close_matches(key, leaves, n=1, cutoff=_CUTOFF)
    if near:
        return f"did you mean {' or '.join(name for name in everywhere if name.rpartition('.')[2] == near[0])}?"
    other, command = (Config, "train") if root is SFTConfig else (SFTConfig, "sft")
    hint = f"; this one is a key of `tidemill {command}`" if path in {*names_of(other), *paths_of(other)} else ""
    return f"known keys: {', '.join(known)}{hint}"


def paths_of(cls: type, where: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield all keys except sections and the options of the algorithm, as "section.key"."""
    hints = get_type_hints(cls)
    for name in names_of(cls):
        path = (*where, name)
        parts = list(BACKENDS.values()) if path == ("engine",) else [section_in(hints[name])]
        for part in parts:
            if part is None:
                yield ".".join(path)
            else:
                yield from paths_of(part, path)
