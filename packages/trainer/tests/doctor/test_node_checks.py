import re

import pytest
from tidemill_trainer.doctor.facts import GPU
from tidemill_trainer.doctor.node_checks import check_address, check_model, check_node

_IN_USE = GPU(index=3, total_bytes=80 << 30, free_bytes=10 << 30, processes=((77, "python"),))
_INVISIBLE = GPU(index=0, total_bytes=80 << 30, free_bytes=10 << 30, processes=())
_FREE = GPU(index=0, total_bytes=80 << 30, free_bytes=79 << 30, processes=())


def test_healthy_node_has_no_findings(make_node):
    node = make_node(gpus=(_FREE,))
    assert [*check_node(node), *check_model(node), *check_address(node)] == []


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"open_files": 1024}, r"may open 1024 files, expected at least 4096; raise the limit with `ulimit -n 65536`"),
        ({"shared_memory_bytes": 64 << 20}, r"/dev/shm has 0\.06 GiB, expected at least 1 GiB.*; enlarge it"),
        ({"gpus": (_IN_USE,)}, r"GPU 3 has 10\.0 of 80\.0 GiB free, used by process 77 \(python\); stop what uses it"),
        ({"gpus": (_INVISIBLE,)}, r"GPU 0 has .* free, used by processes that are not visible here"),
        (
            {"leftovers": ("/tmp/tidemill-run-x",)},
            r"left /tmp/tidemill-run-x; .*repeat this command with --clean",
        ),
    ],
)
def test_problem_of_a_node_is_a_warning_with_node_cause_and_remedy(make_node, facts, message):
    (finding,) = check_node(make_node(4, **facts))
    assert re.match(rf"node4 \(10\.0\.0\.4\): .*{message}", str(finding))
    assert not finding.is_error


def test_model_that_a_node_cannot_read_is_an_error(make_node):
    (finding,) = check_model(make_node(model="found no config.json in /models/8b"))
    assert finding.is_error
    assert "config key model.path: found no config.json in /models/8b; copy the model" in str(finding)


@pytest.mark.parametrize(
    ("facts", "message", "is_error"),
    [
        ({"address": "127.0.0.1", "interface": "lo"}, r"is the loopback address 127\.0\.0\.1, .*--node-ip-addr", True),
        (
            {"interface": None},
            r"no network interface has its address in the cluster, 10\.0\.0\.1, so gloo",
            False,
        ),
    ],
)
def test_address_that_other_nodes_cannot_reach_is_reported(make_node, facts, message, is_error):
    (finding,) = check_address(make_node(1, **facts))
    assert re.search(message, str(finding))
    assert finding.is_error == is_error
