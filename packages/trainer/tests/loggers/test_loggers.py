"""One suite for all loggers, with the real packages: wandb offline, MLflow with a file store."""

import contextlib
import json
import math
import os
import re
import shutil
import struct
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
import wandb
from tidemill_trainer.checkpoints import Checkpoints
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config_file import ConfigError, load_config
from tidemill_trainer.loggers import FACTORIES, open_loggers
from tidemill_trainer.run_dir import RunDir

NAMES = ["tensorboard", "wandb", "mlflow"]


@pytest.fixture(autouse=True)
def local_servers(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))


@pytest.fixture
def run(tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    return RunDir(tmp_path / "runs" / "mine")


def config(*names, **changes):
    overrides = [f"trainer.{key}={value}" for key, value in changes.items()]
    return load_config(DEMO_CONFIG, ["model.path=m", f"trainer.logger={json.dumps(names)}", *overrides])


def save_checkpoint(run, step):
    Checkpoints(run.checkpoints, max_to_keep=1).save(step, lambda folder: None)


def wait_for_the_next_second():
    """wandb names the folder of an offline run with its id and the second of its start."""
    now = int(time.time())
    while int(time.time()) == now:
        time.sleep(0.01)


def read_tensorboard(run):
    from tensorboardX.proto.event_pb2 import Event

    points = defaultdict(list)
    for file in sorted((run.path / "tensorboard").iterdir()):
        data, start = file.read_bytes(), 0
        while start < len(data):  # TFRecord: length, checksum, event, checksum
            (length,) = struct.unpack_from("<Q", data, start)
            event = Event.FromString(data[start + 12 : start + 12 + length])
            for value in event.summary.value:
                points[value.tag, event.step].append(value.simple_value)
            start += 16 + length
    return points


def wandb_records(file):
    """Return the records of a file in LevelDB's log format. wandb writes it in a process of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = []
    while not any(record.HasField("exit") for record in records):
        data, start, part, records = file.read_bytes(), 7, b"", []
        while start + 7 <= len(data):
            if 2**15 - start % 2**15 < 7:  # the end of a block is padding
                start += 2**15 - start % 2**15
                continue
            length, kind = struct.unpack_from("<HB", data, start + 4)
            part += data[start + 7 : start + 7 + length]
            start += 7 + length
            if kind in (1, 4) and start <= len(data):  # a whole record, or the last part of one
                records.append(Record.FromString(part))
                part = b""
    return records


def read_wandb(run):
    points = defaultdict(list)
    ids = set()
    for file in sorted(run.path.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(file):
            ids |= {record.run.run_id} - {""}
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rl_step = row.pop("step", None)
            step = row.pop("sft/step", rl_step)
            for name in row.keys() - {"_step", "_timestamp", "_runtime"}:
                points[name, step].append(row[name])
    assert len(ids) == 1
    return points


def read_mlflow(run, name="mine"):
    from mlflow import MlflowClient

    client = MlflowClient()
    all_runs = client.search_runs([client.get_experiment_by_name("tidemill").experiment_id])
    [found] = [each for each in all_runs if each.info.run_name == name]
    return defaultdict(
        list,
        {
            (name, point.step): [same.value for same in history if same.step == point.step]
            for name in found.data.metrics
            for history in [client.get_metric_history(found.info.run_id, name)]
            for point in history
        },
    )


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def test_every_logger_receives_the_metrics_with_their_names_and_steps(name, run, progress):
    with open_loggers(config(name), run, progress):
        run.append_metrics({"step": 0, "phase": "rl", "val/accuracy": 0.25})
        run.append_metrics({"step": 1, "phase": "rl", "critic/score/mean": 0.5, "norm": math.inf, "n": 3})
    points = READERS[name](run)
    assert points["val/accuracy", 0] == [0.25]
    assert points["critic/score/mean", 1] == [0.5]
    assert points["n", 1] == [3]
    assert ("norm", 1) not in points
    assert not any("phase" in key for key, _ in points)


def test_metric_name_with_other_characters_is_logged(name, run, progress):
    with open_loggers(config(name), run, progress):
        run.append_metrics({"step": 1, "phase": "rl", "val-core/数学 <b>/acc/mean@1": 0.5})
    names = {
        "tensorboard": "val-core/数学__b_/acc/mean_1",
        "wandb": "val-core/数学 <b>/acc/mean@1",
        "mlflow": "val-core/数学 _b_/acc/mean_at_1",
    }
    assert READERS[name](run)[names[name], 1] == [0.5]


def test_data_source_that_is_an_address_or_a_path_is_logged(name, run, progress):
    with open_loggers(config(name), run, progress):
        for step in (1, 2):
            run.append_metrics(
                {"step": step, "phase": "rl", "episode/https://x/y/seconds/mean": 0.5, "episode//data/./a/status/ok": 2}
            )
    logged = {tuple(key): values for key, values in READERS[name](run).items()}
    assert sorted(step for _, step in logged) == [1, 1, 2, 2]
    assert sorted(value for [value] in logged.values()) == [0.5, 0.5, 2, 2]


def test_steps_of_the_warm_up_do_not_mix_with_steps_of_reinforcement_learning(name, run, progress):
    with open_loggers(config(name), run, progress):
        for step in (1, 2):
            run.append_metrics({"step": 0, "phase": "sft", "sft/step": step, "sft/loss": 1 / step, "perf/s": 8.0})
        run.append_metrics({"step": 1, "phase": "rl", "perf/s": 4.0})
    points = READERS[name](run)
    assert [points["sft/loss", step] for step in (1, 2)] == [[1.0], [0.5]]
    assert (points["sft/perf/s", 1], points["perf/s", 1]) == ([8.0], [4.0])
    assert ("perf/s", 0) not in points


def test_resumed_run_continues_without_logging_a_step_twice(name, run, progress):
    with open_loggers(config(name), run, progress):
        for step in (1, 2, 3):
            run.append_metrics({"step": step, "phase": "rl", "x": float(step)})
    save_checkpoint(run, 2)
    wait_for_the_next_second()
    with open_loggers(config(name), run, progress):
        run.remove_after(2)
        for step in (3, 4):
            run.append_metrics({"step": step, "phase": "rl", "x": float(step)})
    points = READERS[name](run)
    assert {step: values for (_, step), values in points.items()} == {1: [1.0], 2: [2.0], 3: [3.0], 4: [4.0]}


def test_copy_of_a_run_has_a_run_of_its_own_in_each_logger(name, run, progress):
    with open_loggers(config(name), run, progress):
        run.append_metrics({"step": 1, "phase": "rl", "x": 1.0})
    save_checkpoint(run, 1)
    copy = RunDir(run.path.with_name("copy"))
    shutil.copytree(run.path, copy.path, ignore=shutil.ignore_patterns("wandb"))
    wait_for_the_next_second()
    with open_loggers(config(name), copy, progress):
        copy.append_metrics({"step": 2, "phase": "rl", "x": 2.0})
    points = READERS[name](copy, "copy") if name == "mlflow" else READERS[name](copy)
    assert {step: values for (_, step), values in points.items()} == {1: [1.0], 2: [2.0]}
    original = READERS[name](run)
    assert {step: values for (_, step), values in original.items()} == {1: [1.0]}
    ids = [json.loads((each.path / "loggers" / f"{name}.json").read_text())["run_id"] for each in (run, copy)]
    assert ids[0] != ids[1]


def test_logger_that_is_added_on_resume_receives_the_earlier_steps(name, run, progress):
    for step in (1, 2, 3):
        run.append_metrics({"step": step, "phase": "rl", "x": float(step)})
    save_checkpoint(run, 2)
    with open_loggers(config(name), run, progress):
        run.remove_after(2)
        run.append_metrics({"step": 3, "phase": "rl", "x": 30.0})
    points = READERS[name](run)
    assert {step: values for (_, step), values in points.items()} == {1: [1.0], 2: [2.0], 3: [30.0]}


def test_failing_logger_is_reported_once_and_others_continue(run, progress, terminal, tmp_path):
    store, broken = tmp_path / "mlruns", tmp_path / "broken"
    with open_loggers(config("mlflow", "tensorboard"), run, progress):
        run.append_metrics({"step": 1, "phase": "rl", "x": 1.0})
        store.rename(broken)
        store.touch()
        for step in (2, 3):
            run.append_metrics({"step": step, "phase": "rl", "x": float(step)})
    assert terminal.getvalue().count("the logger mlflow failed at step 2 and is disabled; the training continues") == 1
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]
    assert read_tensorboard(run)["x", 3] == [3.0]

    store.unlink()
    broken.rename(store)
    save_checkpoint(run, 3)
    with open_loggers(config("mlflow"), run, progress):
        run.append_metrics({"step": 4, "phase": "rl", "x": 4.0})
    assert {step: values for (_, step), values in read_mlflow(run).items()} == {s: [s] for s in (1, 2, 3, 4)}


def fill_the_disk_of_tensorboard(run):
    """Let each further write to the event file fail as on a full disk."""
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and str(run.path / "tensorboard") in os.readlink(link):
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, int(link.name))
            os.close(full)


def kill_wandb(run):
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    services = [child for child in children if "wandb-core" in child.cmdline()[0]]
    assert services
    for service in services:
        service.kill()
        service.wait()


@pytest.fixture
def wandb_restarts():
    """Let later tests start another service of wandb."""
    yield
    with contextlib.suppress(ConnectionError, RuntimeError):  # the service was killed; uvloop raises RuntimeError
        wandb.teardown()


@pytest.mark.usefixtures("wandb_restarts")
@pytest.mark.parametrize(("name", "fail"), [("tensorboard", fill_the_disk_of_tensorboard), ("wandb", kill_wandb)])
def test_logger_that_fails_in_the_middle_of_a_run_does_not_stop_it(name, fail, run, progress, terminal):
    """Each step has more metrics than tensorboardX buffers."""
    with open_loggers(config(name), run, progress):
        run.append_metrics({"step": 1, "phase": "rl", "x": 1.0})
        fail(run)
        for step in range(2, 12):
            run.append_metrics({"step": step, "phase": "rl", **{f"x{number}": 1.0 for number in range(500)}})
    failures = re.findall(r"the logger (\w+) (.*)", terminal.getvalue().split("metrics are also in")[1])
    assert [found for found, _ in failures] == [name]
    assert re.match(r"failed at step \d+ and is disabled; the training continues", failures[0][1])
    assert [row["step"] for row in run.read_metrics()] == list(range(1, 12))


def test_logger_that_cannot_finish_is_reported(run, progress, terminal, tmp_path):
    with open_loggers(config("mlflow"), run, progress):
        shutil.rmtree(tmp_path / "mlruns")
    assert "the logger mlflow could not send everything: " in terminal.getvalue()


def test_logger_that_cannot_start_is_a_user_error(run, progress, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    with (
        pytest.raises(ConfigError, match=r'trainer\.logger: cannot start "mlflow": .*; correct this, or remove'),
        open_loggers(config("tensorboard", "mlflow"), run, progress),
    ):
        raise AssertionError("the training starts")


def test_missing_package_is_a_user_error_that_names_the_extra(run, progress, monkeypatch):
    def factory(experiment):
        import tidemill_missing_package  # noqa: F401

    monkeypatch.setitem(FACTORIES, "wandb", factory)
    with (
        pytest.raises(ConfigError, match=r"requires tidemill_missing_package, .* pip install 'tidemill-trainer\[wandb"),
        open_loggers(config("wandb"), run, progress),
    ):
        raise AssertionError("the training starts")


@pytest.mark.parametrize(("failed", "status"), [(False, "FINISHED"), (True, "FAILED")])
def test_mlflow_run_has_the_configuration_and_the_status_of_the_run(run, progress, failed, status):
    from mlflow import MlflowClient

    try:
        with open_loggers(config("mlflow", project_name="sums"), run, progress):
            if failed:
                raise RuntimeError("stop")
    except RuntimeError:
        assert failed
    client = MlflowClient()
    [found] = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert found.info.status == status
    assert found.data.params["trainer.logger"] == "('mlflow',)"
    assert found.data.params["rollout.n"] == str(config().rollout.n)


def test_wandb_leaves_no_files_outside_of_the_run(run, progress, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_loggers(config("wandb"), run, progress):
        run.append_metrics({"step": 1, "phase": "rl", "x": 1.0})
    assert set(os.listdir(tmp_path)) == {"runs"}
    assert set(os.listdir(run.path)) == {"loggers", "metrics.jsonl", "wandb"}


def test_loggers_are_those_of_the_configuration(config_file):
    assert list(FACTORIES) == NAMES
    with pytest.raises(ConfigError, match=r"logger\.0 must be 'tensorboard', 'wandb' or 'mlflow', got 'console'"):
        load_config(config_file, ["trainer.logger=['console']"])
