"""The command `tidemill replay`: repeat recorded steps of a run and compare the weights bit for bit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tidemill_trainer.batch_record import BatchRecord, RecordedStep, repeatable
from tidemill_trainer.checkpoints import Checkpoints
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, load_config
from tidemill_trainer.learner import Learner
from tidemill_trainer.mismatch import MismatchError, MismatchGate
from tidemill_trainer.progress import Progress
from tidemill_trainer.replay_generation import GenerationReplay
from tidemill_trainer.role_groups import RoleGroups
from tidemill_trainer.run_dir import RunDir, check_same
from tidemill_trainer.timing import Timing
from tidemill_trainer.training_step import Trained, TrainingStep
from tidemill_trainer.waits import Waits

_MODELS = {"engine": "the policy", "critic": "the critic"}
_MAX_SHOWN = 3


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
    def checkpoint(self) -> Path | None:
        """Folder of the checkpoint."""
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
    first, last = ((possible[0] or 0) + 1, recorded[-1]) if steps is None else steps
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
    if not rollout.deterministic or rollout.dtype != "float32":
        raise ConfigError(
            'the generation can be replayed with rollout.deterministic=true and rollout.dtype="float32", got '
            f'{str(rollout.deterministic).lower()} and "{rollout.dtype}"; replay without --generation'
        )


def _check_layout(step: int, recorded: RecordedStep, config: Config) -> None:
    num_ranks, expected = len(recorded.weights["engine"]), config.actor.num_workers
    if num_ranks != expected:
        raise ConfigError(
            f"step {step} was trained by {num_ranks} ranks, and the configuration has actor.num_workers={expected}; "
            "weights are bitwise equal only in the same layout, so restore the run's configuration"
        )


def repeat(plan: ReplayPlan, folder: RunDir, progress: Progress, *, has_generation: bool = False) -> None:
    """Start the training workers and repeat the steps.

    Args:
        plan: result of `replay_plan`.
        folder: folder for logs.
        progress: terminal output.
        has_generation: also start engines, and repeat the generation.

    Raises:
        MismatchError: a step came out differently.
    """
    from tidemill_trainer.cluster import Cluster
    from tidemill_trainer.replay_cluster import ReplayCluster

    if has_generation:
        with Cluster(plan.config, folder, progress) as cluster, cluster.watch():
            cluster.wait_ready()
            generation = GenerationReplay(plan.config, plan.run, plan.steps, cluster.engines, cluster.rollout, progress)
            groups = RoleGroups(plan.config, cluster.actor, cluster.roles)
            list(repeat_steps(plan, groups, cluster.watch.waits, progress, generation))
    else:
        with ReplayCluster(plan.config, folder, progress) as cluster, cluster.watch():
            cluster.wait_ready()
            groups = RoleGroups(plan.config, cluster.workers, cluster.roles)
            list(repeat_steps(plan, groups, cluster.watch.waits, progress))
    progress.info(f"{len(plan.steps)} steps are equal", style="bold")


def repeat_steps(
    plan: ReplayPlan, groups: RoleGroups, waits: Waits, progress: Progress, generation: GenerationReplay | None = None
) -> Iterator[int]:
    """Restore the checkpoint, repeat the steps and yield the number of each that came out equal.

    Args:
        plan: what to repeat.
        groups: workers that have loaded the initial model.
        waits: waits of the driver.
        progress: terminal output, one line per step.
        generation: repeats the generation; None: only the training is repeated.

    Raises:
        MismatchError: a step came out differently.
    """
    learner = Learner(plan.config, groups)
    with waits("roles"):
        learner.init_reward_model()
        learner.init_roles(plan.run.initial_policy, is_resumed=plan.checkpoint is not None)
    if plan.checkpoint is not None:
        with waits("load_checkpoint"):
            learner.load_checkpoint(plan.checkpoint)
    origin = "the initial model" if plan.checkpoint is None else str(plan.checkpoint)
    progress.info(f"replaying steps {plan.steps[0]} to {plan.steps[-1]} from {origin}")
    training = TrainingStep(plan.config, learner, MismatchGate(float("inf"), ()))  # the run has passed its gate
    record = BatchRecord(plan.run.batches)
    for step in plan.steps:
        recorded, timing = record.load(step), Timing(waits)
        if generation is not None:
            with timing("gen"):
                generation.run(step - 1)
        trained = training.run(step, recorded.episodes, timing)
        with timing("save_batch"):
            weights = learner.hash_weights()
        if differences := _differences(recorded, trained, weights):
            raise MismatchError(f"step {step} differs: {'; '.join(differences)}")
        seconds = sum(timing.seconds.values())
        progress.info(
            f"step {step}: equal ({len(trained.batch)} rows, {trained.num_tokens} tokens, {len(recorded.metrics)} "
            f"metrics, weights {weights['engine'][0]}; {seconds:.1f} s)"
        )
        yield step


def _differences(recorded: RecordedStep, trained: Trained, weights: Mapping[str, list[str]]) -> list[str]:
    """Return what differs, the first metrics and then the weights."""
    before, after = recorded.metrics, repeatable(trained.metrics)
    names = [name for name in {**before, **after} if not _equal(before.get(name), after.get(name))]
    found = [f"{name} was {before.get(name)}, is {after.get(name)}" for name in names[:_MAX_SHOWN]]
    if len(names) > _MAX_SHOWN:
        found.append(f"{len(names) - _MAX_SHOWN} further metrics")
    for model, hashes in recorded.weights.items():
        pairs = enumerate(zip(hashes, weights[model], strict=True))
        different = [f"{rank} ({old}, now {new})" for rank, (old, new) in pairs if old != new]
        if different:
            found.append(f"the weights of {_MODELS[model]} on rank {', '.join(different)}")
    return found


def _equal(before: float | None, after: float | None) -> bool:
    return before == after or (before is not None and after is not None and before != before and after != after)


def _ranges(steps: Sequence[int]) -> str:
    """Return ascending numbers as text, such as "1:4, 7:9"."""
    starts = [step for step in steps if step - 1 not in steps]
    ends = [step for step in steps if step + 1 not in steps]
    return ", ".join(f"{start}:{end}" for start, end in zip(starts, ends, strict=True))


def replay_config(plan: ReplayPlan) -> Config:
    """Return the configuration of the replay's own folder, `replay` in the folder of the run."""
    trainer = replace(plan.config.trainer, name="replay", run_dir=str(plan.run.path), logger=())
    return replace(plan.config, trainer=trainer)
