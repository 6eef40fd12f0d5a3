"""The agreement of log-probs between an engine and the training workers, on a few tokens."""

import tempfile
from dataclasses import replace
from pathlib import Path

from tidemill_dataproto import DataProto
from tidemill_rollout import Problem, Session
from tidemill_rollout.episodes.single_turn import generate_reply

from tidemill_trainer.algorithm_config import AlgorithmConfig, RewardModelConfig
from tidemill_trainer.cluster import Cluster
from tidemill_trainer.config import Config, EpisodeConfig, RewardConfig
from tidemill_trainer.data import to_problems
from tidemill_trainer.doctor.finding import Finding
from tidemill_trainer.inputs import load_inputs
from tidemill_trainer.learner import Learner
from tidemill_trainer.mismatch import MismatchError, MismatchGate
from tidemill_trainer.progress import Progress
from tidemill_trainer.role_groups import RoleGroups
from tidemill_trainer.rollout.episode_task import Episodes, EpisodeTask
from tidemill_trainer.run import quiet_libraries
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.staleness import staleness_of

_NUM_TOKENS = 16
_NUM_PROBLEMS = 4


async def episode(problem: Problem, session: Session) -> float:
    """Generate one reply; it is not scored."""
    await generate_reply(problem, session)
    return 0.0


def compare_log_probs(config: Config, progress: Progress) -> list[Finding]:
    """Start the engines and the training workers of a run, update the weights once, and compare log-probs.

    Replies to four training problems have up to 16 tokens each. The limit is that of the run's gate on the mismatch
    (`rollout.max_log_prob_abs_diff`).
    """
    quiet_libraries()
    config = _policy_alone(config)
    inputs = load_inputs(config, progress)
    assert inputs.train is not None
    problems = to_problems(inputs.train, "doctor")[:_NUM_PROBLEMS]
    tasks = [
        EpisodeTask(number=number, problem=problem, sample=0, seed=number, is_shown=False)
        for number, problem in enumerate(problems)
    ]
    parent = Path(config.trainer.run_dir)  # which all nodes share
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="doctor-", dir=parent) as folder:
        episodes, batch = _sample(config, tasks, RunDir(Path(folder)), progress)
    if batch is None:
        reasons = {summary.outcome.reason for summary in episodes.summaries}
        return [_finding(f"no episode has a reply: {', '.join(sorted(reasons))}")]
    dtypes = config.rollout.quantization or config.rollout.dtype, config.engine.param_dtype
    gate = MismatchGate(config.rollout.max_log_prob_abs_diff, dtypes)
    staleness = staleness_of(batch, version=0)
    try:
        metrics = gate.check(batch, staleness)
    except MismatchError as error:
        return [_finding(str(error))]
    mean, largest = (metrics[f"rollout/log_prob_abs_diff/{name}"] for name in ("mean", "max"))
    progress.info(
        f"log-probs of engine and training: {len(staleness)} tokens differ by {mean:.2g}, at most {largest:.2g}"
    )
    return []


def _sample(
    config: Config, tasks: list[EpisodeTask], run: RunDir, progress: Progress
) -> tuple[Episodes, DataProto | None]:
    """Run episodes and compute the log-probs of their replies; None if there is no reply."""
    with Cluster(config, run, progress) as cluster, cluster.watch():
        cluster.wait_ready()
        cluster.engines.update_weights(0)
        cluster.episodes.load(config)
        episodes = cluster.episodes.wait(cluster.episodes.start(tasks, greedy=False))
        learner = Learner(config, RoleGroups(config, cluster.actor, cluster.roles))
        return episodes, None if episodes.rows is None else learner.infer(episodes.rows)


def _policy_alone(config: Config) -> Config:
    """Return the configuration of a run that generates short replies and has no other role than the policy."""
    return replace(
        config,
        algorithm=AlgorithmConfig(),
        actor=replace(config.actor, ppo_epochs=2),  # log-probs are then computed before the update, which is not made
        critic=type(config.critic)(),
        teacher=type(config.teacher)(),
        reference=type(config.reference)(),
        reward_model=RewardModelConfig(),
        reward=RewardConfig(),
        episode=EpisodeConfig(function=f"{__name__}:episode"),
        rollout=replace(
            config.rollout,
            response_length=min(_NUM_TOKENS, config.rollout.response_length),
            max_staleness=0,
        ),
    )


def _finding(cause: str) -> Finding:
    return Finding(
        node="engine and training workers",
        cause=cause,
        remedy="see rollout.max_log_prob_abs_diff in docs/configuration.md of tidemill-trainer; with this "
        "configuration, a run would stop in its first step",
    )
