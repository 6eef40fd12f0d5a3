import pytest
from tidemill_trainer.stalls.member import join_run


def test_process_on_a_node_that_does_not_see_the_folder_of_the_run_is_refused(tmp_path):
    with pytest.raises(
        RuntimeError, match=r"runs/mine/logs of the run on node \S+ \(.*run_dir must be on a file system"
    ):
        join_run(str(tmp_path / "runs" / "mine" / "logs"), "actor_0")
