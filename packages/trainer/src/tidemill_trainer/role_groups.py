"""The worker groups of a run's models, and calls to several of them at the same time."""

from collections.abc import Mapping, Sequence

from tidemill_dataproto import DataProto
from tidemill_dispatch.ray import RayWorkerGroup

from tidemill_trainer.algorithm import Algorithm
from tidemill_trainer.config import Config
from tidemill_trainer.roles import Role, has_adapter_reference, required_roles


class RoleGroups:
    """The worker groups that hold the policy and the other roles. A group is called once for all its roles.

    Args:
        config: configuration of the run.
        actor: the group of `ActorWorker`s, with the policy and the roles that have no group of their own.
        own: the groups of `RoleWorker`s by role.
    """

    def __init__(self, config: Config, actor: RayWorkerGroup, own: Mapping[Role, RayWorkerGroup]) -> None:
        self.actor = actor
        self._own = own
        roles = required_roles(config)
        shared: Sequence[Role] = [role for role in roles if role not in own]
        self._members = [(actor, shared)] if shared else []
        self._members += [(own[role], [role]) for role in roles if role in own]
        self._actor_infers = bool(shared) or Algorithm.of(config).infers_policy or has_adapter_reference(config)

    def of(self, role: Role) -> RayWorkerGroup:
        """Return the group that holds a role."""
        return self._own.get(role, self.actor)

    def init_roles(self, roles: Sequence[Role], initial_policy: str) -> None:
        """Load the models of roles; `initial_policy` is the folder of those without a path."""
        members = [(group, [role for role in held if role in roles]) for group, held in self._members]
        calls = [group.init_roles(to_load, initial_policy) for group, to_load in members if to_load]
        for call in calls:
            call.get()

    def infer(self, batch: DataProto) -> list[DataProto]:
        """Return the columns that the policy and the roles compute, with the rows of `batch`; one item per group.

        Args:
            batch: batch with `input_ids` and `responses`, and what else the policy requires.
        """
        calls = [self.actor.infer(batch)] if self._actor_infers else []
        inputs = batch.select(["input_ids", "responses"], [])
        calls += [group.infer(inputs) for group, _ in self._members if group is not self.actor]
        return [call.get() for call in calls]

    def save_checkpoint(self, folder: str) -> None:
        """Save the states of policy and critic to subfolders of `folder`, the same for any groups."""
        for group in self._trained():
            group.save_checkpoint(folder)

    def finish_checkpoint(self, *, waits: bool) -> bool:
        """Return whether all ranks have written what `save_checkpoint` and `save_hf` save, after a wait if `waits`."""
        return all(all(group.finish_checkpoint(waits=waits)) for group in self._trained())

    def load_checkpoint(self, folder: str) -> None:
        """Restore what `save_checkpoint` saved, in any groups."""
        for group in self._trained():
            group.load_checkpoint(folder)

    def hash_weights(self) -> dict[str, list[str]]:
        """Return the hash of the weights of policy ("engine") and critic for each rank."""
        hashes: dict[str, list[str]] = {}
        for group in self._trained():
            ranks = group.hash_weights()
            hashes |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
        return hashes

    def _trained(self) -> list[RayWorkerGroup]:
        return [self.actor] + ([self._own["critic"]] if "critic" in self._own else [])
