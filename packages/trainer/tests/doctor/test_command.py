import tempfile

import pytest
from tidemill_engines.location import file_system
from tidemill_testing.s3 import s3_bucket
from tidemill_trainer.cli import DEMO_CONFIG, DEMO_CONFIGS, main


@pytest.fixture
def doctor(monkeypatch, tmp_path, capsys):
    """Run the command in an empty folder; return the status, and what was printed."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(*args):
        status = main(["doctor", *map(str, args)])
        return status, capsys.readouterr()

    return run


def test_doctor_without_a_configuration_describes_this_machine(doctor, tmp_path):
    (tmp_path / "tidemill-run-old").mkdir()
    status, printed = doctor()
    assert printed.out.count(f"dead runs left {tmp_path}/tidemill-run-old") == 1
    assert status == 0
    assert "torch" in printed.out
    assert "0 errors, " in printed.out


def test_doctor_reports_warnings_and_errors_of_a_configuration(doctor, assets, tmp_path):
    (tmp_path / "tidemill-run-old").mkdir()
    status, printed = doctor(DEMO_CONFIG, *assets, "engine.device=cpu", "actor.num_workers=9999")
    assert status == 1
    assert "error: " in printed.err
    assert "actor.num_workers must be <= " in printed.err
    assert f"warning: {printed.err.split('error: ')[1].split(':')[0]}: dead runs left {tmp_path}/tidemill-run-old" in (
        printed.out
    )
    assert "1 error, " in printed.out


def test_doctor_clean_prints_what_it_removed(doctor, tmp_path):
    (tmp_path / "tidemill-run-old").mkdir()
    status, printed = doctor("--clean")
    assert status == 0
    assert f"removed {tmp_path}/tidemill-run-old" in printed.out
    assert not (tmp_path / "tidemill-run-old").exists()
    assert "dead runs left nothing" in doctor("--clean")[1].out


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("s3://tests/runs", ""),
        (
            "s3://nobody/runs",
            "config key trainer.checkpoint_dir: could not write to s3://nobody/runs/",
        ),
        (
            "gs://tests/runs",
            "config key trainer.checkpoint_dir: could not write to gs://tests/runs/",
        ),
    ],
)
def test_doctor_writes_and_reads_where_checkpoints_will_be(doctor, assets, where, message):
    with s3_bucket() as url:
        status, printed = doctor(DEMO_CONFIG, *assets, "engine.device=cpu", f"trainer.checkpoint_dir={where}")
        assert status == bool(message)
        assert message in printed.err.replace("\n", " ")
        assert not file_system(url).find(url)


@pytest.mark.parametrize("key", ["trainer.run_dir", "trainer.checkpoint_dir"])
def test_doctor_reports_a_folder_that_cannot_be_written(doctor, assets, tmp_path, key):
    (tmp_path / "file").touch()
    status, printed = doctor(DEMO_CONFIG, *assets, "engine.device=cpu", f"{key}={tmp_path}/file/runs")
    assert status == 1
    assert f"config key {key}: could not write to {tmp_path}/file/runs/" in " ".join(printed.err.split())
    assert "set it to a folder in which files can be written" in " ".join(printed.err.split())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.toml"], "none.toml does not exist; check the path"),
        ([DEMO_CONFIG, "model.path=nowhere"], "expected a Hugging Face model in "),
        ([DEMO_CONFIG, "model.paht=x"], "unknown config key model.paht"),
        ([DEMO_CONFIGS["sft"], "model.path=x", "data.train_batch_size=0"], "data.train_batch_size must be >= 1, got 0"),
        ([DEMO_CONFIGS["sft"], "model.path=x", "--log-probs"], "--log-probs requires a configuration of `tidemill tra"),
        (["--log-probs"], "--log-probs require a CONFIG.toml; add it"),
        (["--address=127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1: "),
    ],
)
def test_wrong_input_is_an_error_without_traceback(doctor, args, message):
    status, printed = doctor(*args)
    assert status == 1
    assert message in printed.err
    assert "Traceback" not in printed.err
