"""What verl trains on: the model, problems and settings of a run of tidemill."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from tidemill_trainer.config import Config
from tidemill_trainer.data import PromptLoader, load_prompts
from tidemill_trainer.rewards import reward_function
from tidemill_trainer.roles import needed_roles
from tidemill_trainer.rollouts import sampling_seeds
from tidemill_trainer.tokenizer import load_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

HOOKS = Path(__file__).parent
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def check(config: Config) -> None:
    """Exit unless verl can do the same as this run."""
    required = {
        "rollout.response_lengths must not be empty; give --lengths": bool(config.rollout.response_lengths),
        'episode.function must be "single_turn"': config.episode.function == "single_turn",
        'algorithm.adv_estimator must be "grpo"': config.algorithm.adv_estimator == "grpo",
        "algorithm.filter_groups must be none": config.algorithm.filter_groups is None,
        "rollout.max_staleness must be 0": config.rollout.max_staleness == 0,
        "model.lora must be none": config.model.lora is None,
        "trainer.nnodes must be 1": config.trainer.nnodes == 1,
        "the policy must be the only model": not needed_roles(config),
    }
    for message, is_met in required.items():
        if not is_met:
            sys.exit(f"for a comparison with verl, {message}")


def write_problems(config: Config, num_steps: int, file: Path) -> bool:
    """Write the problems of all steps in the order of the run, with the lengths of their responses.

    Returns:
        Whether the prompts are text, without a chat template.
    """
    n, size, seed = config.rollout.n, config.data.train_batch_size, config.trainer.seed
    lengths = config.rollout.response_lengths
    problems, _ = load_prompts(config.data.train_files, load_tokenizer(config.model), config.data)
    loader = PromptLoader(problems, size, seed)
    rows, is_text = [], False
    for step in range(1, num_steps + 1):
        replayed = [lengths[number % len(lengths)] for number in sampling_seeds([seed, step], size * n)]
        for number, problem in enumerate(loader.problems((step - 1) * size, size, step)):
            is_text = isinstance(problem.prompt, str)
            extra = {"index": problem.ordinal, "lengths": replayed[number * n : (number + 1) * n]}
            rows.append(
                {
                    "data_source": problem.data_source,
                    "prompt": [{"role": "user", "content": problem.prompt}] if is_text else problem.prompt,
                    "reward_model": {"style": "rule", "ground_truth": str(problem.ground_truth)},
                    "extra_info": extra,
                }
            )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return is_text


def write_model(source: Path, target: Path, seed: int | None, is_text: bool) -> None:
    """Write the model of a run for verl, which reads weights from files: with random ones if the run has a seed."""
    target.mkdir()
    if seed is None:
        for file in source.iterdir():
            (target / file.name).symlink_to(file.resolve())
    else:
        torch.manual_seed(seed)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.bfloat16)
        model.save_pretrained(target)
        (target / "generation_config.json").unlink(missing_ok=True)
    if seed is not None or is_text:
        tokenizer = AutoTokenizer.from_pretrained(source)
        if is_text:
            tokenizer.chat_template = PLAIN_TEMPLATE
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (target / name).unlink(missing_ok=True)  # otherwise a symlink to the file of the source
        tokenizer.save_pretrained(target)


def verl_settings(config: Config, folder: Path, num_steps: int, num_gpus: int) -> dict[str, Any]:
    """Return the keys of verl's configuration that differ from its defaults."""
    length = config.data.max_prompt_length + config.rollout.response_length
    reward = reward_function(config)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    # 32,768 tokens are fastest for 0.6B, with hidden states of 1,024 elements; activations are proportional to both.
    max_tokens = 32768 * 1024 // AutoConfig.from_pretrained(config.model.path).get_text_config().hidden_size
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": f"[{folder}/problems.parquet]",
        "data.val_files": f"[{folder}/problems.parquet]",
        "data.train_batch_size": config.data.train_batch_size,
        "data.max_prompt_length": config.data.max_prompt_length,
        "data.max_response_length": config.rollout.response_length,
        "data.filter_overlong_prompts": False,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": f"{folder}/model",
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.use_liger": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": config.model.gradient_checkpointing,
        f"{actor}.strategy": "fsdp",
        f"{actor}.fsdp_config.reshard_after_forward": False,
        f"{actor}.optim.lr": config.optimizer.lr,
        f"{actor}.ppo_mini_batch_size": config.actor.ppo_mini_batch_size or config.data.train_batch_size,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": max(min(32768, max_tokens), length),
        f"{rollout}.name": "sglang",
        f"{rollout}.tensor_model_parallel_size": config.rollout.tensor_parallel_size,
        f"{rollout}.gpu_memory_utilization": 0.35,
        f"{rollout}.free_cache_engine": False,
        f"{rollout}.n": config.rollout.n,
        f"{rollout}.temperature": config.rollout.temperature,
        f"{rollout}.top_p": config.rollout.top_p,
        f"{rollout}.top_k": config.rollout.top_k,
        f"{rollout}.max_num_seqs": config.data.train_batch_size * config.rollout.n,
        f"{rollout}.max_model_len": length + 64,
        f"{rollout}.agent.default_agent_loop": "fixed_length",
        f"{rollout}.agent.agent_loop_config_path": f"{folder}/loops.yaml",
        **{f"+{rollout}.engine_kwargs.sglang.{key}": value for key, value in _sglang_arguments(config).items()},
        "reward.custom_reward_function.path": inspect.getsourcefile(reward),
        "reward.custom_reward_function.name": reward.__name__,  # pyright: ignore[reportAttributeAccessIssue]
        "trainer.v1.sampler.custom_sampler.path": HOOKS / "verl_hooks.py",
        "trainer.v1.sampler.custom_sampler.name": "FrequentReplayBuffer",
        "trainer.n_gpus_per_node": num_gpus,
        "trainer.logger": "[console,file]",
        "trainer.total_training_steps": num_steps,
        "trainer.total_epochs": 1,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "ray_kwargs.ray_init.num_cpus": 64,  # not cores: its processes reserve one each
    }


def _sglang_arguments(config: Config) -> dict[str, Any]:
    """Return what `tidemill bench` gives SGLang on a Hopper GPU, without its own sampler."""
    return {
        "attention_backend": "fa3",  # verl's default is FlashInfer
        "sampling_backend": "pytorch",
        "cuda_graph_max_bs_decode": min(config.data.train_batch_size * config.rollout.n, 512),
        "chunked_prefill_size": 32768,
        "max_prefill_tokens": 32768,
        "disable_prefill_cuda_graph": True,
        "enable_memory_saver": False,
        **{key: value for key, value in config.rollout.engine_args.items() if key != "load_format"},
    }


def overridden(settings: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Return settings as verl's arguments, replaced by or extended with `key=value` or `+key=value`."""
    names = {key.lstrip("+"): key for key in settings}
    merged = dict(settings)
    for override in overrides:
        key, _, value = override.partition("=")
        merged[names.get(key.lstrip("+"), key)] = value
    return [f"{key}={value}" for key, value in merged.items()]
