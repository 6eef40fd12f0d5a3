"""The worker of the models besides the policy: a Ray actor with one rank of each."""

from collections.abc import Sequence
from functools import reduce

from tidemill_algorithms import CriticLoss
from tidemill_dataproto import DataProto
from tidemill_dispatch import Dispatch, register
from tidemill_engines import BaseEngine

from tidemill_trainer.config import Config
from tidemill_trainer.reward_model import score_rows
from tidemill_trainer.roles import Role, build_role
from tidemill_trainer.training_worker import TrainingWorker, compute


class RoleWorker(TrainingWorker):
    """One rank of reference, critic, teacher and reward model.

    Args:
        config: configuration of the run.
        log_dir: folder for the log of this process.
        group: name of the group of workers, in the name of the log.
    """

    def __init__(self, config: Config, log_dir: str, group: str = "actor") -> None:
        super().__init__(config, log_dir, group)
        self._config = config
        self._roles: dict[Role, BaseEngine] = {}
        self._value_loss = CriticLoss(cliprange_value=config.critic.cliprange_value)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def init_roles(self, roles: Sequence[Role], initial_policy: str) -> None:
        """Load the models of roles; `initial_policy` is the folder of those without a path."""
        for role in roles:
            engine = build_role(self._config, role, initial_policy)
            self._initialize(engine)
            self._roles[role] = engine

    @register(compute, blocking=False)
    def infer(self, batch: DataProto) -> DataProto:
        """Compute what the update requires from each role.

        Returns:
            `ref_log_prob` of the reference, `teacher_log_prob` of the teacher and `values` of the critic, ragged like
            `responses`, and `rm_scores` float32 [B] of the reward model. With `teacher.topk`, also the teacher's most
            probable tokens `topk_ids` int32 [B, j, topk] and their log-probs `teacher_topk_log_probs` [B, j, topk].
        """
        return reduce(DataProto.union, self._infer_roles(batch))

    def _infer_roles(self, batch: DataProto) -> list[DataProto]:
        """Return the columns of each role that is here."""
        parts = []
        inputs = batch.select(["input_ids", "responses"], [])  # the experts are those of the policy
        if (reference := self._roles.get("reference")) is not None:
            parts.append(reference.infer_batch(inputs).rename("log_probs", "ref_log_prob"))
        if (teacher := self._roles.get("teacher")) is not None:
            parts.append(infer_teacher(teacher, inputs, self._config.teacher.topk))
        if (critic := self._roles.get("critic")) is not None:
            parts.append(critic.infer_batch(inputs))
        if (reward_model := self._roles.get("reward_model")) is not None:
            parts.append(score_rows(reward_model, inputs))
        return parts

    @register(compute)
    def score(self, batch: DataProto) -> DataProto:
        """Compute `rm_scores` float32 [B] of the reward model from ragged `input_ids`."""
        return score_rows(self._roles["reward_model"], batch)

    @register(compute, blocking=False)
    def update_critic(self, batch: DataProto) -> dict[str, float]:
        """Make one optimizer step of the critic; return metrics of the global batch, equal on all ranks."""
        return prefixed("critic", self._roles["critic"].train_batch(batch, self._value_loss))

    def _trained(self) -> dict[str, BaseEngine]:
        critic = self._roles.get("critic")
        return super()._trained() | ({} if critic is None else {"critic": critic})


def infer_teacher(teacher: BaseEngine, inputs: DataProto, topk: int | None) -> DataProto:
    """Return the columns of the teacher; see `RoleWorker.infer`."""
    found = teacher.infer_batch(inputs, top_k=topk).rename("log_probs", "teacher_log_prob")
    return found if topk is None else found.rename("topk_log_probs", "teacher_topk_log_probs")


def prefixed(role: str, metrics: dict[str, float]) -> dict[str, float]:
    """Prefix the metrics that every engine reports with the role."""
    own = ("loss", "grad_norm", "grad_nonfinite", "lr")
    return {f"{role}/{name}" if name in own else name: value for name, value in metrics.items()}
