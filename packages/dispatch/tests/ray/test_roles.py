"""Groups with several roles in each process, and async methods."""

import asyncio
import os
import sys
import threading

import pytest
from tidemill_dispatch import (
    Dispatch,
    ListBatch,
    Worker,
    WorkerDiedError,
    WorkerError,
    register,
    split_over,
)

ray = pytest.importorskip("ray")
from ray import cloudpickle  # noqa: E402
from tidemill_dispatch.ray import (  # noqa: E402
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])
_compute = split_over("train")


class Role(Worker):
    def __init__(self, tag, fail=False):
        if fail:
            raise OSError("no such model")
        self.tag = tag
        # One name with different shards: the actor splits over both ranks, the critic has one shard.
        self.register_dispatch_collect_info("train", *((self.rank, True) if tag == "actor" else (0, self.rank == 1)))

    @register(Dispatch.ONE_TO_ALL)
    def who(self):
        return self.tag, self.rank, os.getpid()

    @register(_compute, blocking=False)
    def see(self, batch):
        self.seen = batch.items
        return ListBatch([(self.tag, item) for item in batch])

    @register(Dispatch.ONE_TO_ALL)
    def shards(self):
        return self.seen


class Critic(Role):
    @register(Dispatch.ONE_TO_ALL)
    def exit(self):
        os._exit(1)

    def not_registered(self):
        return self.tag


class AsyncWorker(Worker):
    @register(split_over("all"))
    async def double(self, batch):
        assert threading.current_thread() is threading.main_thread()
        return ListBatch(await asyncio.gather(*[self._later(item) for item in batch]))

    async def _later(self, item):
        await asyncio.sleep(0.01)
        return 2 * item

    @register(Dispatch.ONE_TO_ALL)
    async def leave_task(self):
        self.register_dispatch_collect_info("all", self.rank, True)
        self.task = asyncio.get_running_loop().create_task(self._later(21))

    @register(Dispatch.ONE_TO_ALL)
    async def await_task(self):
        return await self.task

    @register(Dispatch.ONE_TO_ALL)
    async def fail(self, how):
        raise asyncio.CancelledError if how == "cancel" else ValueError("later")

    async def direct(self, x):
        return await self._later(x)


def start(**kwargs):
    classes = create_colocated_worker_cls(
        {"actor": RayClassWithInitArgs(Role, "actor"), "critic": RayClassWithInitArgs(Critic, "critic", **kwargs)}
    )
    return RayWorkerGroup(RayResourcePool([2]), classes, name_prefix="both", timeout_s=60)


def test_roles_share_processes_and_no_state(ray_cluster):
    with start() as group:
        roles = group.spawn({"actor", "critic"})
        actor, critic = roles["actor"], roles["critic"]
        assert [entry[:2] for entry in actor.who()] == [("actor", 0), ("actor", 1)]
        assert [entry[:2] for entry in critic.who()] == [("critic", 0), ("critic", 1)]
        assert [entry[2] for entry in actor.who()] == [entry[2] for entry in critic.who()]
        assert (actor.dp_size("train"), critic.dp_size("train")) == (2, 1)

        future = critic.see(actor.see(ListBatch([1, 2, 3])))  # between roles of one process, 2 shards to 1
        assert future.get().items == [("critic", ("actor", row)) for row in (1, 2, 3)]
        assert actor.shards() == [[1, 2], [3]]
        assert critic.shards() == [[("actor", 1), ("actor", 2), ("actor", 3)]] * 2

        assert ray.get(group.workers[0].critic_not_registered.remote()) == "critic"
        with pytest.raises(AttributeError, match=r"has the roles \['actor', 'critic'\]; call 'who' on one"):
            _ = group.who
        with pytest.raises(AttributeError, match=r"Role.exit cannot be called on group 'both/actor': no such method"):
            _ = actor.exit
        with pytest.raises(
            ValueError, match=r"group 'both' does not have the roles \['ref'\]; its roles are \['actor', 'critic'\]"
        ):
            group.spawn(["ref"])
        with pytest.raises(WorkerDiedError, match=r"group 'both/critic' .* died during 'exit'"):
            critic.exit()
        with pytest.raises(WorkerDiedError, match=r"group 'both/critic' .* died during 'exit'"):
            actor.who()


def test_error_of_a_role_s_constructor_is_raised(ray_cluster):
    with pytest.raises(WorkerError, match=r"OSError on rank . of group 'both' .* in '__init__': no such model"):
        start(fail=True)


def test_wrong_roles_are_refused():
    with pytest.raises(ValueError, match=r"must map one or more role names to classes, got the names \[\]"):
        create_colocated_worker_cls({})
    with pytest.raises(TypeError, match="role 'actor' must be a RayClassWithInitArgs, got type"):
        create_colocated_worker_cls({"actor": Role})


class PrefixedWorker(Worker):
    def critic_not_registered(self): ...


def test_wrong_arguments_of_a_group_are_refused():
    pool, init = RayResourcePool([1]), RayClassWithInitArgs(Role, "actor")
    for arguments, message in [
        ((pool, Role), r"ray_cls_with_init must be RayClassWithInitArgs\(cls, ...\) or .*, got <class .*Role'>"),
        (([1], init), r"resource_pool must be a RayResourcePool\(\[...\]\), got \[1\]"),
    ]:
        with pytest.raises(TypeError, match=message):
            RayWorkerGroup(*arguments, name_prefix="wrong")
    with pytest.raises(TypeError, match=r"timeout_s must be a number of seconds \(math.inf for no timeout\), got None"):
        RayWorkerGroup(pool, init, name_prefix="wrong", timeout_s=None)


def test_roles_whose_methods_have_one_name_on_actor_handles_are_refused():
    critic = RayClassWithInitArgs(Critic, "critic")
    classes = {"new": RayClassWithInitArgs(PrefixedWorker), "new_critic": critic}
    message = (
        r"'critic_not_registered' of role 'new' and 'not_registered' of role 'new_critic' are both 'new_critic_not_"
    )
    with pytest.raises(ValueError, match=message):
        create_colocated_worker_cls(classes)


def test_async_methods_run_in_order_on_one_event_loop(ray_cluster):
    with RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(AsyncWorker), name_prefix="async") as group:
        group.leave_task()
        assert group.double(ListBatch([1, 2, 3])).items == [2, 4, 6]
        assert group.await_task() == [42, 42]
        assert ray.get(group.workers[1].direct.remote(4)) == 8
        with pytest.raises(WorkerError, match="later"):
            group.fail("raise")
        with pytest.raises(WorkerError, match="CancelledError"):
            group.fail("cancel")
        assert group.await_task() == [42, 42]
        with pytest.raises(ValueError, match="requires a group with roles, but group 'async' has one worker class"):
            group.spawn()
