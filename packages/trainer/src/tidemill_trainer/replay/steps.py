"""The repeated steps, compared with the record bit for bit."""

from collections.abc import Iterator, Mapping

from tidemill_trainer.batch_record import BatchRecord, RecordedStep, repeatable
from tidemill_trainer.cluster import Cluster
from tidemill_trainer.learner import Learner
from tidemill_trainer.mismatch import MismatchError, MismatchGate
from tidemill_trainer.progress import Progress
from tidemill_trainer.replay.cluster import ReplayCluster
from tidemill_trainer.replay.generation import GenerationReplay
from tidemill_trainer.replay.plan import ReplayPlan
from tidemill_trainer.role_groups import RoleGroups
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.timing import Timing
from tidemill_trainer.training_step import Trained, TrainingStep
from tidemill_trainer.waits import Waits

_MODELS = {"engine": "the policy", "critic": "the critic"}
_MAX_SHOWN = 3


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
    if has_generation:
        with Cluster(plan.config, folder, progress) as cluster, cluster.watch():
            cluster.wait_ready()
            generation = GenerationReplay(plan.config, plan.run, plan.steps, cluster.engines, progress)
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
