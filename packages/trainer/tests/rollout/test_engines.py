"""Engines that are added and removed: real Ray actors and episode workers, with an engine that does not generate."""

import io
import sys
import threading
import time

import psutil
import pytest
import ray
from rich.console import Console
from tidemill_dispatch import Dispatch, Worker, WorkerDiedError, register
from tidemill_dispatch.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tidemill_trainer.config_file import load_config
from tidemill_trainer.doctor.room import Demand
from tidemill_trainer.progress import Progress
from tidemill_trainer.rollout.engine_control import receive
from tidemill_trainer.rollout.engine_requests import EngineRequest, EngineRequestError, EngineRequests, send
from tidemill_trainer.rollout.engines import Engines
from tidemill_trainer.rollout.episode_pool import EpisodePool
from tidemill_trainer.rollout.episode_worker import EpisodeWorker
from tidemill_trainer.stalls.watch import Watch
from tidemill_trainer.waits import Waits

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
_WAIT_S = 240

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class QuickEngine(Worker):
    """The rollout worker of an engine that starts at once, if it does not fail."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def start_engine(self, gpus=()):
        if self.fails:
            raise RuntimeError("no memory for the KV pool")

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def connect_episode_workers(self, workers):
        pass

    def devices(self):
        return "cpu"

    def get_weight_version(self):
        return "7"

    def queue(self):
        return "3 unfinished requests"


class QuickPolicy(Worker):
    """A training worker that can be connected with engines."""

    @register(Dispatch.ONE_TO_ALL)
    def connect_engines(self, engines, address):
        pass


class Run:
    """Engines with an episode worker, and answers to requests."""

    def __init__(self, config, folder, *, num_engines=1):
        self.fails = False
        self.folder = folder
        self.config = load_config(config, [f"rollout.num_engines={num_engines}", "placement.engines=separate"])
        self.output = io.StringIO()
        progress = Progress(Console(file=self.output, width=500))
        self.engines = Engines(self.start, self.config, progress, str(folder))
        self.engines.start_processes()
        for started in self.engines.start():
            started.get()
        worker = ray.remote(EpisodeWorker).options(num_cpus=0, max_concurrency=100)
        self.worker = worker.remote(0, self.engines.numbers(), str(folder))
        self.engines.serve([self.worker])

    def start(self, number):
        init = RayClassWithInitArgs(QuickEngine, self.fails)
        pool = RayResourcePool([1], num_cpus_per_worker=0.1)
        return RayWorkerGroup(pool, init, name_prefix=f"rollout_{number}", blocking=False)

    def request(self, action, count=1, name=None):
        answers = self.folder / f"{time.monotonic_ns()}.answers"
        answers.touch()
        return EngineRequest(action=action, count=count, name=name, answers=answers, pending=set())

    def fulfil(self, request):
        """Fulfil a request and return its answers."""
        self.engines.accept(request)
        deadline = time.monotonic() + _WAIT_S
        while '"status": 0' not in (text := request.answers.read_text()) and '"status": 1' not in text:
            assert time.monotonic() < deadline, text
            self.engines.poll()
        return text

    def wait_for_mailboxes(self, *names):
        """Wait until the episode worker knows these engines; its calls may overtake each other."""
        deadline = time.monotonic() + _WAIT_S
        while {name for name in ("engine 0", "engine 1", "engine 2") if name in self.queue()} != set(names):
            assert time.monotonic() < deadline, self.queue()

    def repeat(self, call):
        """Repeat a call until it raises; Ray may report a death late."""
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            call()

    def queue(self):
        return ray.get(self.worker.queue.remote())

    def close(self):
        ray.kill(self.worker)
        for engine in self.engines.all():
            engine.group.shutdown()


@pytest.fixture
def begin(ray_cluster, config_file, tmp_path):
    runs = []

    def begin(**options):
        runs.append(Run(config_file, tmp_path, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def test_added_engine_serves_and_removed_engine_exits(begin):
    run = begin()
    text = run.fulfil(run.request("add", 2))
    assert "rollout_1 serves" in text
    assert "rollout_2 serves" in text
    assert run.engines.numbers() == [0, 1, 2]
    assert run.engines.num_added == 2
    run.wait_for_mailboxes("engine 0", "engine 1", "engine 2")
    processes = {
        number: psutil.Process(ray.get(worker.tidemill_describe.remote()).pid)
        for number, worker in run.engines.workers.items()
    }
    assert "rollout_0 was removed" in run.fulfil(run.request("remove", name="rollout_0"))
    assert "rollout_2 was removed" in run.fulfil(run.request("remove"))  # the newest
    assert run.engines.numbers() == [1]
    assert [process.is_running() for process in processes.values()] == [False, True, False]
    run.wait_for_mailboxes("engine 1")
    assert "rollout_3 serves" in run.fulfil(run.request("add"))  # a number is used once


def test_last_engine_and_unknown_ones_are_not_removed(begin):
    run = begin(num_engines=2)
    for count, name, message in (
        (5, None, "cannot remove 5 of the engines rollout_0, rollout_1: the run requires one that serves"),
        (1, "rollout_7", "the run has no engine 'rollout_7' to remove; its engines are rollout_0, rollout_1"),
    ):
        with pytest.raises(EngineRequestError, match=message):
            run.engines.accept(run.request("remove", count, name))
    first, second = run.request("remove"), run.request("remove")
    run.engines.accept(first)
    run.engines.accept(second)  # both are possible now, but not one after the other
    run.engines.poll()
    assert "the run requires one that serves" in second.answers.read_text()
    run.engines.poll()
    assert run.engines.numbers() == [0]


def test_engine_that_fails_to_start_is_reported_and_the_others_serve(begin):
    run = begin()
    run.fails = True
    text = run.fulfil(run.request("add"))
    assert "rollout_1: could not be started: no memory for the KV pool. See " in text
    assert '"status": 1' in text
    assert run.engines.numbers() == [0]
    run.engines.poll()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[torch_memory_saver.cpp] cu_mem_create has CUDA_ERROR_OUT_OF_MEMORY", "It had no memory left ([torch_memory"),
        ("Segmentation fault", "repeated. See "),
    ],
)
def test_warning_about_a_dead_engine_names_its_log_and_full_memory(begin, line, words):
    run = begin()
    log = run.folder / "rollout_0.log"
    log.write_text(f"{line}\nscheduler exits\n")
    ray.kill(run.engines.workers[0])
    deadline = time.monotonic() + _WAIT_S
    while "rollout_0 died and is started again" not in run.output.getvalue():
        assert time.monotonic() < deadline
        run.engines.poll()
    assert words in run.output.getvalue()
    assert str(log) in run.output.getvalue()


def test_engine_that_dies_while_it_is_removed_is_not_started_again(begin):
    run = begin(num_engines=2)
    request = run.request("remove", name="rollout_1")
    run.engines.accept(request)
    ray.kill(run.engines.workers[1])
    deadline = time.monotonic() + _WAIT_S
    while "rollout_1 was removed" not in request.answers.read_text():
        assert time.monotonic() < deadline
        run.engines.poll()
    assert run.engines.num_restarts == 0


@pytest.mark.parametrize("replaces", ["engine", "episode worker"])
def test_dead_training_worker_is_named_before_anything_is_replaced(begin, replaces):
    run = begin()
    policy = RayWorkerGroup(
        RayResourcePool([1], num_cpus_per_worker=0.1), RayClassWithInitArgs(QuickPolicy), name_prefix="actor"
    )
    run.engines.connect(policy)
    ray.kill(policy.workers[0])
    with pytest.raises(WorkerDiedError):
        run.repeat(policy.check_alive)
    if replaces == "engine":
        ray.kill(run.engines.workers[0])
    with pytest.raises(WorkerDiedError, match="rank 0 of group 'actor'"):
        run.repeat(run.engines.poll if replaces == "engine" else lambda: run.engines.serve([]))
    assert run.engines.num_restarts == 0


def test_replacement_that_has_no_room_waits_while_training_workers_live(begin, progress, tmp_path):
    run = begin()
    policy = RayWorkerGroup(
        RayResourcePool([1], num_cpus_per_worker=0.1), RayClassWithInitArgs(QuickPolicy), name_prefix="actor"
    )
    run.engines.connect(policy)
    policy.wait_ready()
    others = RayWorkerGroup(
        RayResourcePool([1], num_cpus_per_worker=3.5), RayClassWithInitArgs(QuickPolicy), name_prefix="others"
    )
    watch = Watch(Waits({}), tmp_path, progress)
    pool = EpisodePool(1, run.engines, str(tmp_path), progress, watch)
    death = threading.Timer(2.0, ray.kill, [policy.workers[0]])
    death.start()
    with pytest.raises(WorkerDiedError, match="rank 0 of group 'actor'"):
        pool.load(run.config)
    death.join()
    pool.shutdown()
    others.shutdown()


def test_requests_are_answered_with_the_engines_or_with_what_is_missing(begin, tmp_path):
    run = begin()
    requests = EngineRequests(tmp_path / "requests")
    requests.open()
    demand = Demand.of("engines to add", 1, 1.0)

    def ask(action, count=1):
        answers = send(tmp_path / "requests", action, count=count, name=None, is_running=lambda: True)
        return next(_during(answers, lambda: receive(requests, run.engines, demand)))

    assert ask("list")[0].endswith("3 unfinished requests  has no weights yet")
    run.engines.version = 7
    text, status = ask("list")
    assert status == 0
    lines = text.splitlines()
    assert lines[0].split() == ["engine", "node", "devices", "version", "requests", "state"]
    assert lines[1].split()[0] == "rollout_0"
    assert lines[1].endswith("cpu      7        3 unfinished requests  serving")
    text, status = ask("add", 2)
    assert status == 1
    assert "no room for engines to add=2: expected 1 CPU, 1 GPU on one node for each, got these nodes:" in text
    assert "1 GPU missing" in text


def _during(answers, call):
    """Yield answers; call `call` in another thread until the first one is there."""
    done = threading.Event()

    def work():
        while not done.wait(0.1):
            call()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield from answers
    finally:
        done.set()
        thread.join()
