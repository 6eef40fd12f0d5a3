"""The doctor on two nodes, which are namespaces of this machine."""

import subprocess
import sys
from pathlib import Path

import pytest
from tidemill_testing.nodes import start_nodes, why_no_nodes
from tidemill_testing.tiny import tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("cluster"),
    pytest.mark.skipif(why_no_nodes() is not None, reason=str(why_no_nodes())),
]
_TIDEMILL = str(Path(sys.executable).parent / "tidemill")
_SIZES = ("data.max_prompt_length=64", "rollout.response_length=64")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder that both nodes share, with a model and a configuration."""
    folder = tmp_path_factory.mktemp("shared")
    tiny_model(folder / "model", "qwen3")
    (folder / "run.toml").write_text(f"[model]\npath = '{folder / 'model'}'\n[trainer]\nrun_dir = '{folder}/runs'\n")
    return folder


@pytest.fixture(scope="module")
def doctor(shared):
    """Run the command on the first of two nodes, whose models in /tmp/model differ; return status and output."""
    with start_nodes(2, shared=[shared]) as nodes:
        for node in nodes:
            node.run("cp", "-r", str(shared / "model"), "/tmp/model")
            node.start_ray(head=nodes[0], num_cpus=2, timeout_s=300)
        nodes[1].run("bash", "-c", "echo >> /tmp/model/config.json")
        nodes[0].run("cp", "-r", str(shared / "model"), "/tmp/model-of-first")

        def run(*args):
            command = [_TIDEMILL, "doctor", str(shared / "run.toml"), *_SIZES, *args]
            cluster = f"--address={nodes[0].address}:6379"
            process = nodes[0].start(*command, cluster, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            output, _ = process.communicate(timeout=300)
            return process.returncode, output

        yield run


def test_equal_nodes_have_no_errors_and_their_link_is_measured(doctor):
    status, output = doctor()
    assert status == 0, output
    assert "error" not in output.replace("0 errors", "")
    assert "node0 (10.77.0.1) to node1 (10.77.0.2): gloo all-reduce " in output


def test_node_that_differs_is_named_with_cause_and_remedy(doctor):
    status, output = doctor("model.path=/tmp/model", "trainer.run_dir=/tmp/runs", "episode.num_workers=3")
    assert status == 1
    assert "the cluster: no room for episode.num_workers=3, only for " in output
    assert "node1 (10.77.0.2): the model differs from that on node0 (10.77.0.1) in config.json; copy " in output
    assert "node1 (10.77.0.2): config key trainer.run_dir: a file that the driver wrote to /tmp/runs cannot" in output
    assert "3 errors" in output


def test_model_on_one_node_only_is_an_error_of_the_other_one(doctor):
    status, output = doctor("model.path=/tmp/model-of-first")
    assert status == 1
    assert "error: node1 (10.77.0.2): config key model.path: found no config.json in /tmp/model-of-first; " in output
    assert "1 error," in output
