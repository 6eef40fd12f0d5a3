"""The names of configuration keys: which there are, and which is meant by one that there is not."""

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from tidemill_engines.config import EngineConfig
from tidemill_engines.megatron.config import MegatronConfig

from tidemill_trainer.config import Config

BACKENDS: dict[str, type] = {"fsdp2": EngineConfig, "megatron": MegatronConfig}
SHORT = {  # for the command line, as Megatron's users call them
    "engine.tp": "engine.tensor_model_parallel_size",
    "engine.pp": "engine.pipeline_model_parallel_size",
    "engine.vpp": "engine.virtual_pipeline_model_parallel_size",
    "engine.cp": "engine.context_parallel_size",
    "engine.ep": "engine.expert_model_parallel_size",
    "engine.etp": "engine.expert_tensor_parallel_size",
}
# Below this likeness a suggestion is a guess, and one that is followed changes what is trained.
_CUTOFF = 0.75

_NO_KL = "there is no KL term here, neither in the loss nor in the reward, and no reference model"
_NO_CRITIC = "there is no critic here: advantages are those of GRPO"
_ONE_NODE = "a run lives on one node; actor.num_workers and rollout.num_engines say how much of it"
_TENSOR_PARALLEL = ("rollout.tensor_parallel_size", "engine.tensor_model_parallel_size")
RENAMED: dict[str, tuple[str, ...]] = {  # from verl's last part of a name to the keys here
    "max_response_length": ("rollout.response_length",),
    "filter_overlong_prompts": ("data.overlong_prompts",),
    "truncation": ("data.overlong_prompts",),
    "total_training_steps": ("trainer.total_steps", "optimizer.total_steps"),
    "experiment_name": ("trainer.name",),
    "default_local_dir": ("trainer.run_dir",),
    "max_actor_ckpt_to_keep": ("trainer.max_ckpt_to_keep",),
    "n_gpus_per_node": ("actor.num_workers",),
    "strategy": ("engine.backend",),
    "clip_ratio": ("actor.clip_ratio_low", "actor.clip_ratio_high"),
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
_ABSENT = {  # what verl has and this trainer has otherwise, or not
    **dict.fromkeys(("use_kl_loss", "kl_loss_coef", "kl_loss_type", "use_kl_in_reward"), _NO_KL),
    **dict.fromkeys(("kl_coef", "kl_ctrl", "kl_penalty", "ref"), _NO_KL),
    **dict.fromkeys(("critic", "critic_warmup", "gamma", "lam"), _NO_CRITIC),
    "adv_estimator": "there is no other estimator than GRPO's; algorithm.norm_adv_by_std_in_grpo=false is Dr. GRPO's",
    "total_epochs": "a run's length is given in steps, trainer.total_steps",
    "nnodes": _ONE_NODE,
    "use_dynamic_bsz": "micro-batches are formed by tokens, unless engine.micro_batch_size_per_gpu is set",
    "val_kwargs": "validation decodes greedily, one response per problem",
    "resume_mode": "the option --resume of the command continues a run",
    "logger": "metrics are in metrics.jsonl of the run's folder, and in its report.html",
    "actor_rollout_ref": "its parts are the sections model, engine, optimizer, actor and rollout here",
    "optim": "the section is optimizer here",
    "custom_reward_function": 'it is reward.function="path/file.py:name" here',
    "reward_model": 'there is no reward model here; a reward function is reward.function="path/file.py:name"',
}


def section_in(hint: Any) -> type | None:
    """The dataclass of a field annotated with it, with `X | None` or with `tuple[X, ...]`."""
    return next((kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind)), None)  # type: ignore[return-value]


def names_of(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def advice(where: tuple[str, ...], key: str, known: list[str]) -> str:
    """What to write instead of the unknown `key` of the section `where`, whose keys are `known`."""
    path = ".".join((*where, key))
    if path in SHORT:
        return f"in a file it has its long name, {SHORT[path]}"
    if key in RENAMED:
        here = [name for name in RENAMED[key] if name.startswith(f"{'.'.join(where)}.")]
        return f"it is {' or '.join(here or RENAMED[key])} here"
    if key in _ABSENT:
        return _ABSENT[key]
    near = difflib.get_close_matches(key, known, n=1, cutoff=_CUTOFF)
    if near:
        return f"did you mean {'.'.join((*where, near[0]))}?"
    everywhere = sorted(set(paths_of(Config)))
    leaves = {name.rpartition(".")[2] for name in everywhere}
    near = difflib.get_close_matches(key, leaves, n=1, cutoff=_CUTOFF)
    if near:
        return f"did you mean {' or '.join(name for name in everywhere if name.rpartition('.')[2] == near[0])}?"
    return f"known here: {', '.join(known)}"


def paths_of(cls: type, where: tuple[str, ...] = ()) -> Iterator[str]:
    """All keys that are no sections, as "section.key"."""
    hints = get_type_hints(cls)
    for name in names_of(cls):
        path = (*where, name)
        parts = list(BACKENDS.values()) if path == ("engine",) else [section_in(hints[name])]
        for part in parts:
            if part is None:
                yield ".".join(path)
            else:
                yield from paths_of(part, path)
