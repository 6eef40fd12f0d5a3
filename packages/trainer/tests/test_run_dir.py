import pytest
from tidemill_trainer.cli import DEMO_CONFIG
from tidemill_trainer.config_file import ConfigError, load_config
from tidemill_trainer.run_dir import RunDir, open_run


def _config(tmp_path, *overrides):
    return load_config(DEMO_CONFIG, [f"trainer.run_dir={tmp_path}", *overrides])


def test_a_run_folder_is_not_used_twice(tmp_path):
    config = _config(tmp_path, "trainer.name=a")
    run = open_run(config, "x", resume=False)
    assert load_config(run.config) == config
    # The saved file is enough to resume.
    assert open_run(load_config(run.config), "config", resume=True).path == run.path
    with pytest.raises(ConfigError, match=r"a exists; continue it with --resume, or choose another trainer\.name"):
        open_run(config, "x", resume=False)
    assert open_run(config, "x", resume=True).path == run.path


def test_resume_refuses_another_experiment_and_allows_more_steps(tmp_path):
    open_run(_config(tmp_path, "trainer.name=a"), "x", resume=False)
    with pytest.raises(ConfigError, match=r"made with other values of optimizer\.lr, rollout\.n"):
        open_run(_config(tmp_path, "trainer.name=a", "optimizer.lr=1.0", "rollout.n=3"), "x", resume=True)
    with pytest.raises(ConfigError, match=r"made with other values of trainer\.seed"):
        open_run(_config(tmp_path, "trainer.name=a", "trainer.seed=7"), "x", resume=True)
    run = open_run(
        _config(tmp_path, "trainer.name=a", "trainer.total_steps=999", "actor.timeout_s=7"), "x", resume=True
    )
    assert load_config(run.config).trainer.total_steps == 999


def test_resume_without_a_name_takes_the_newest_of_the_stem(tmp_path):
    with pytest.raises(ConfigError, match="there is no run to resume at"):
        open_run(_config(tmp_path), "mine", resume=True)
    run = open_run(_config(tmp_path), "mine", resume=False)
    open_run(_config(tmp_path), "mine-too", resume=False)
    assert open_run(_config(tmp_path), "mine", resume=True).path == run.path


def test_forget_after_drops_later_steps_and_half_a_line(tmp_path):
    run = RunDir(tmp_path)
    for step in (0, 1, 2, 3):
        run.append_metrics({"step": step, "x": step / 3})
        run.append_rollouts([{"step": step}, {"step": step}])
    with run.metrics.open("a") as lines:
        lines.write('{"step": 4, "x"')
    run.forget_after(2)
    assert run.read_metrics() == [{"step": step, "x": step / 3} for step in (0, 1, 2)]
    assert len(run.read_rollouts()) == 6
