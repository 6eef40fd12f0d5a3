import fcntl
import multiprocessing
import os
import pickle
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tidemill_trainer.rollout.engine_files import EngineFiles, remove_leftovers, remove_when_unused

_FORK = multiprocessing.get_context("fork")  # a new interpreter would import torch first


class Process:
    """A process that sends the result of `work` and sleeps until it is killed."""

    def __init__(self, work, *args):
        ours, theirs = _FORK.Pipe()

        def run():
            theirs.send(work(*args))
            time.sleep(600)

        self._process = _FORK.Process(target=run)
        self._process.start()
        self._result = ours

    def result(self):
        assert self._result.poll(60)
        return self._result.recv()

    def kill(self):
        self._process.kill()
        self._process.join()


def _drive():
    files = EngineFiles.create()
    (files.folder / "socket").touch()
    Path(f"/dev/shm/sglang_loads_{files.folder.name}-0.shm").touch()
    return files.folder


def _create_many():
    return all(files.folder.exists() for files in [EngineFiles.create() for _ in range(100)])


def _paths(folder):
    return sorted([*folder.glob("*"), *Path("/dev/shm").glob(f"sglang_loads_{folder.name}-*")])


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    processes = []

    def start(work, *args):
        processes.append(Process(work, *args))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
    remove_leftovers()


def test_next_start_removes_files_of_killed_run_and_no_others(start):
    killed, alive = start(_drive), start(_drive)
    dead_folder, live_folder = killed.result(), alive.result()
    before = _paths(live_folder)
    assert len(before) == len(_paths(dead_folder)) == 2
    killed.kill()
    files = EngineFiles.create()
    assert not dead_folder.exists()
    assert _paths(dead_folder) == []
    assert _paths(live_folder) == before
    alive.kill()
    assert remove_leftovers() == [live_folder]
    assert _paths(live_folder) == []
    assert files.folder.exists()
    files.remove()
    assert not files.folder.exists()


def test_worker_that_outlives_its_driver_keeps_the_files(start):
    driver = start(_drive)
    folder = driver.result()
    worker = start(pickle.loads(pickle.dumps(EngineFiles(folder))).hold)
    assert worker.result() is True
    driver.kill()
    assert remove_leftovers() == []
    assert len(_paths(folder)) == 2
    worker.kill()
    assert remove_leftovers() == [folder]


def test_folders_of_other_programs_are_left_alone(start, tmp_path):
    (tmp_path / "tidemill-run-file").touch()
    (tmp_path / "tidemill-ranks-1").mkdir()
    (tmp_path / "tidemill-run-link").symlink_to(tmp_path / "tidemill-ranks-1")
    assert remove_leftovers() == []
    assert len(list(tmp_path.iterdir())) == 3


def test_folder_that_does_not_exist_cannot_be_held(tmp_path):
    assert EngineFiles(tmp_path / "tidemill-run-gone").hold() is False


def test_folder_that_is_removed_while_hold_waits_is_not_held(tmp_path):
    folder = tmp_path / "tidemill-run-new"
    folder.mkdir()
    cleaner = os.open(folder, os.O_RDONLY)
    fcntl.flock(cleaner, fcntl.LOCK_EX)
    waiting = f":{os.fstat(cleaner).st_ino} "
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(EngineFiles(folder).hold)
        while not any("->" in line and waiting in line for line in Path("/proc/locks").read_text().splitlines()):
            assert not held.done()
        folder.rmdir()
        os.close(cleaner)
        assert held.result() is False


def test_concurrent_starts_do_not_remove_each_others_folders(start):
    assert all(process.result() for process in [start(_create_many) for _ in range(4)])


def test_worker_on_a_node_without_the_folder_creates_and_holds_it(tmp_path):
    folder = tmp_path / "tidemill-run-other"
    worker = Process(EngineFiles(folder).join)
    worker.result()
    assert remove_leftovers(tmp_path) == []
    assert folder.is_dir()
    worker.kill()
    remove_when_unused(folder)
    assert not folder.exists()
