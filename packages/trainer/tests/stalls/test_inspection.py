import pytest
import ray
from tidemill_trainer.stalls.inspection import inspect_nodes, queue_states
from tidemill_trainer.stalls.process import Registration

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("cluster")]


@pytest.mark.usefixtures("ray_cluster")
def test_processes_of_another_node_are_inspected_there(endless, tmp_path):
    node = ray.get_runtime_context().get_node_id()
    stopped = endless("actor_1", stopped=True)
    there = Registration(name=stopped.name, pid=stopped.pid, created_s=stopped.created_s, node=node)
    processes, unreachable = inspect_nodes([there], tmp_path, here="another node")
    assert [process.state.pid for process in processes] == [stopped.pid]
    assert "endless_loop" in processes[0].stack
    assert unreachable == []


@pytest.mark.usefixtures("ray_cluster")
def test_node_that_has_left_the_cluster_is_named(tmp_path):
    lost = Registration(name="actor_0", pid=1, created_s=0.0, node="a" * 56)
    processes, [problem] = inspect_nodes([lost], tmp_path, here="another node")
    assert processes == []
    assert problem.startswith(f"node {lost.node}: failed: ")


@pytest.mark.usefixtures("ray_cluster")
def test_owner_of_a_queue_that_does_not_answer_is_named():
    @ray.remote(num_cpus=0)
    def answer(text):
        if text is None:
            import time

            time.sleep(60)
        return text

    silent = answer.remote(None)
    first = answer.remote("3 requests")
    ray.wait([first])
    states = queue_states({"engine 0": first, "engine 1": silent})
    ray.cancel(silent, force=True)
    assert states == {"engine 0": "3 requests", "engine 1": "no answer within 1 s"}
