"""Router replay in a separate process: `python replay_run.py FOLDER DTYPE` writes its results to FOLDER/seen.json.

Stock SGLang generates rollouts of a tiny Qwen3-MoE in DTYPE. Megatron trains it in float32 on two tensor-parallel
ranks, each with half of the experts.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from tidemill_dataproto import DataProto, ragged
from tidemill_testing import tiny_model
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.cluster import Cluster
from tidemill_trainer.config import Config, RouterReplayConfig
from tidemill_trainer.config_file import load_config
from tidemill_trainer.demo import write_assets
from tidemill_trainer.inputs import load_inputs
from tidemill_trainer.progress import Progress
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.trainer import Trainer
from transformers import AutoTokenizer

EXPERTS, STEPS = 8, 2
COLUMN = "routed_experts"
_REWARD = """
def right_digits(data_source, solution_str, ground_truth, extra_info):
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / 3
"""
_WATCHED = ("rollout/log_prob_abs_diff/mean", "rollout/log_prob_abs_diff/max", "actor/ppo_kl", "actor/grad_norm")


Infer = Callable[[DataProto], DataProto]


def unchanged(infer: Infer) -> Infer:
    return infer


def with_shifted_rollout(infer: Infer) -> Infer:
    """Replace the experts of the rollout by other ones."""
    return lambda batch: infer(shifted(batch))


def without_rollout_experts(infer: Infer) -> Infer:
    """Drop the experts of the rollout, as R2 does not use them."""
    return lambda batch: infer(batch.select(sorted({*batch.batch.keys()} - {COLUMN})))


def with_shifted_update(infer: Infer) -> Infer:
    """Use other experts in the update than for the old log-probs."""
    return lambda batch: shifted(without_rollout_experts(infer)(batch))


def shifted(batch: DataProto) -> DataProto:
    experts = ragged.values(batch.pop([COLUMN])[COLUMN])
    other = torch.where(experts < 0, experts, (experts + 1) % EXPERTS)
    return batch.union(DataProto.from_dict({COLUMN: ragged.like(other, batch["input_ids"])}))


def make_config(folder: Path, dtype: str) -> Config:
    assets = write_assets(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    special_tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tiny_model(
        folder / "model",
        "qwen3_moe",
        vocab_size=len(tokenizer),
        num_hidden_layers=3,
        num_experts=EXPERTS,
        moe_intermediate_size=64,
        **special_tokens,
    )
    (folder / "rewards.py").write_text(_REWARD)
    megatron = [
        "engine.backend=megatron",
        "engine.tp=2",
        "engine.sequence_parallel=true",
        "engine.ep=2",
        "engine.etp=1",
    ]
    small = ["data.train_batch_size=16", "warmup.max_steps=0", "trainer.val_before_train=false"]
    steps = [f"trainer.total_steps={STEPS}", "trainer.test_freq=0", "optimizer.lr_warmup_steps=1"]
    steps.append("rollout.max_log_prob_abs_diff=100")  # the gate would stop the runs with other experts
    files = [f"reward.function={folder / 'rewards.py'}:right_digits", f"rollout.dtype={dtype}"]
    return load_config(DEMO_CONFIG, [*assets, *megatron, *small, *steps, *files, "actor.router_replay.mode=R3"])


def watch(folder: Path, config: Config) -> dict[str, Any]:
    with open(os.devnull, "w") as devnull:
        progress = Progress(Console(file=devnull))
        inputs = load_inputs(config, progress)
        with Cluster(config, RunDir(folder / "cluster"), progress) as cluster:
            cluster.wait_ready()

            def train(name: str, change: Callable[[Infer], Infer], mode: Literal["R2", "R3"]) -> list[dict[str, float]]:
                actor = replace(config.actor, router_replay=RouterReplayConfig(mode=mode))
                run = RunDir(folder / name)
                run.path.mkdir()
                trainer = Trainer(replace(config, actor=actor), cluster, inputs, run, progress)
                trainer._learner.infer = change(trainer._learner.infer)
                trainer.fit()
                rows = [row for row in run.read_metrics() if row["step"] > 0]
                return [{name: row[name] for name in _WATCHED} for row in rows]

            seen: dict[str, Any] = {
                "R3": train("R3", unchanged, "R3"),
                "R3_shifted": train("R3_shifted", with_shifted_rollout, "R3"),
                "R2": train("R2", without_rollout_experts, "R2"),
                "R2_shifted": train("R2_shifted", with_shifted_update, "R2"),
            }
            (folder / "one").mkdir()
            trainer = Trainer(config, cluster, inputs, RunDir(folder / "one"), progress)
            batch = trainer._rollouts.take(1).rows
            assert batch is not None
            columns = ["input_ids", "responses"]
            for name, names in (("replayed", [*columns, COLUMN]), ("free", columns)):
                seen[name] = compare(batch, cluster.actor.infer(batch.select(names)).get())
    return seen


def compare(rollouts: DataProto, training: DataProto) -> dict[str, Any]:
    """Compare experts and log-probs of rollouts with those of training."""
    theirs, ours = ragged.values(rollouts[COLUMN]), ragged.values(training[COLUMN])
    known = theirs >= 0
    differences = ragged.values(rollouts["rollout_log_probs"]) - ragged.values(training["old_log_probs"])
    is_last = torch.zeros(len(theirs), dtype=torch.bool)
    is_last[ragged.offsets(rollouts["input_ids"])[1:] - 1] = True
    is_known = known.any((1, 2))
    return {
        "choices": int(known.sum()),
        "different_choices": int((theirs != ours)[known].sum()),
        "different_experts": int((theirs.sort(-1).values != ours.sort(-1).values)[known].sum()),
        "only_last_tokens_are_unknown": bool((known.all((1, 2)) == ~is_last).all() and (is_known == ~is_last).all()),
        "unknown_are_filled": bool((ours >= 0).all()),
        "log_prob_abs_diff": differences.abs().mean().item(),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    seen = watch(folder, make_config(folder, sys.argv[2]))
    (folder / "seen.json").write_text(json.dumps(seen))
