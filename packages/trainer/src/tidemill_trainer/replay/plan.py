"""Which steps of a run `tidemill replay` repeats, and from where it starts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tidemill_trainer.batch_record import BatchRecord, RecordedStep
from tidemill_trainer.checkpoints import HF_FOLDER, Checkpoints
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, is_sft_config, load_config
from tidemill_trainer.run_dir import RunDir, check_same


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPlan:
    """What to repeat.

    Attributes:
        config: configuration of the run.
        run: folder of the run.
        start: step of the checkpoint from which the replay starts; None: the initial model.
        steps: numbers of the steps to repeat, from the one after `start`.
    """

    config: Config
    run: RunDir
    start: int | None
    steps: range

    @property
    def checkpoint(self) -> str | None:
        """Folder of the checkpoint, or its URL."""
        return None if self.start is None else Checkpoints(self.run.checkpoints, max_to_keep=1).path(self.start)


def replay_plan(
    target: Path, steps: tuple[int, int] | None, overrides: Sequence[str], *, has_generation: bool = False
) -> ReplayPlan:
    """Check that steps of a run can be repeated, before any process starts.

    Args:
        target: folder of the run.
        steps: first and last step; None: all that are recorded and have a checkpoint before them.
        overrides: `key=value` overrides, of keys that may also change on resume.
        has_generation: also repeat the generation.

    Raises:
        ConfigError: there is no such run, it has no record, the steps are not in it, there is no checkpoint before
            them, a file of the record is damaged, another number of ranks trained them, or the engines do not repeat
            what they sample.
    """
    run = RunDir(target)
    if not run.config.is_file():
        raise ConfigError(f"expected the folder of a run, got {target}; it is runs/NAME")
    if is_sft_config(run.config):
        raise ConfigError(
            f"{target} is a run of `tidemill sft`, which has no steps to replay; evaluate its checkpoint with a "
            "configuration of `tidemill train`: "
            f"tidemill eval CONFIG model.path={run.checkpoints}/step_.../{HF_FOLDER}"
        )
    config = load_config(run.config, overrides)
    check_same(config, load_config(run.config), run, "replay")
    if has_generation:
        _check_deterministic(config)
    record = BatchRecord(run.batches)
    recorded = record.steps()
    if not recorded:
        raise ConfigError(f"the run {target} has no record of its batches; train with trainer.save_batches=true")
    starts: list[int | None] = [*Checkpoints(run.checkpoints, max_to_keep=1).steps()]
    if config.warmup.max_steps == 0:
        starts.insert(0, None)
    possible = [start for start in starts if (start or 0) + 1 in recorded]
    if not possible:
        raise ConfigError(
            f"the run {target} has no checkpoint before a recorded step (recorded: {_ranges(recorded)}); raise "
            "trainer.max_ckpt_to_keep to keep more checkpoints"
        )
    first = last = (possible[0] or 0) + 1
    while last + 1 in recorded:  # a resumed run may have recorded only some steps
        last += 1
    first, last = (first, last) if steps is None else steps
    if not recorded[0] <= first <= last <= recorded[-1]:
        raise ConfigError(
            f"expected --steps within the recorded steps {_ranges(recorded)}, got {first}:{last}; choose others"
        )
    earlier = [start for start in starts if (start or 0) < first]
    if not earlier:
        raise ConfigError(
            f"the run {target} has no checkpoint before step {first}; replay steps after {(starts[0] or 0)}, and raise "
            "trainer.max_ckpt_to_keep to keep more checkpoints"
        )
    plan = ReplayPlan(config=config, run=run, start=earlier[-1], steps=range((earlier[-1] or 0) + 1, last + 1))
    for step in plan.steps:
        _check_layout(step, record.load(step), config)
    return plan


def _check_deterministic(config: Config) -> None:
    rollout = config.rollout
    if not rollout.deterministic or rollout.dtype != "float32" or not rollout.recompute_kv_cache:
        raise ConfigError(
            'the generation can be replayed with rollout.deterministic=true, rollout.dtype="float32" and '
            f"rollout.recompute_kv_cache=true, got {str(rollout.deterministic).lower()}, "
            f'"{rollout.dtype}" and {str(rollout.recompute_kv_cache).lower()}; replay without --generation'
        )


def _check_layout(step: int, recorded: RecordedStep, config: Config) -> None:
    actor, critic = config.actor.num_workers, config.critic.num_workers
    expected = {"engine": ("actor", actor), "critic": ("critic", actor if critic is None else critic)}
    for name, weights in recorded.weights.items():
        role, number = expected[name]
        if len(weights) != number:
            raise ConfigError(
                f"step {step} was trained by {len(weights)} ranks, and the configuration has {role}.num_workers="
                f"{number}; weights are bitwise equal only in the same layout, so restore the run's configuration"
            )


def replay_config(plan: ReplayPlan) -> Config:
    """Return the configuration of the replay's own folder, `replay` in the folder of the run."""
    trainer = replace(plan.config.trainer, name="replay", run_dir=str(plan.run.path), checkpoint_dir=None, logger=())
    return replace(plan.config, trainer=trainer)


def _ranges(steps: Sequence[int]) -> str:
    """Return ascending numbers as text, such as "1:4, 7:9"."""
    starts = [step for step in steps if step - 1 not in steps]
    ends = [step for step in steps if step + 1 not in steps]
    return ", ".join(f"{start}:{end}" for start, end in zip(starts, ends, strict=True))
