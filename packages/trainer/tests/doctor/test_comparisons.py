import pytest
from tidemill_trainer.doctor.comparisons import ClockReading, compare_clocks, compare_nodes
from tidemill_trainer.doctor.links import Link, check_links, rounds


def _reading(remote_s, delay_s=0.01):
    return ClockReading(sent_s=100.0, received_s=100.0 + delay_s, remote_s=remote_s)


def test_equal_nodes_have_no_findings(make_node):
    assert compare_nodes([make_node(number) for number in range(3)]) == []


def test_version_of_the_minority_is_an_error_with_both_versions(make_node):
    other = make_node(2, versions={"python": "3.11.7", "torch": "2.10.0"})
    (finding,) = compare_nodes([make_node(0), make_node(1), other])
    assert finding.is_error
    assert str(finding).startswith("node2 (10.0.0.2): expected torch 2.11.0 as on most nodes, found 2.10.0; install")


def test_first_of_two_nodes_is_the_reference(make_node):
    (finding,) = compare_nodes([make_node(0), make_node(1, source="456")])
    assert str(finding).startswith("node1 (10.0.0.1): the source of tidemill's packages differs from that on node0 ")


def test_other_model_is_an_error_that_names_the_files(make_node):
    other = make_node(1, model={"config.json": "a", "model.safetensors": "c", "extra.json": "d"})
    (finding,) = compare_nodes([make_node(0), other, make_node(2)])
    assert finding.is_error
    assert "node1 (10.0.0.1): the model differs from that on node0 (10.0.0.0) in extra.json, model.sa" in str(finding)


def test_node_without_the_model_is_not_compared(make_node):
    assert compare_nodes([make_node(0), make_node(1, model="found no config.json in m")]) == []


def test_clock_offset_is_reported_only_if_it_exceeds_the_error_of_the_reading():
    readings = {
        "ahead": _reading(103.0),
        "behind": _reading(90.0),
        "exact": _reading(100.0),
        "slow": _reading(103.0, 5),
    }
    found = {finding.node: str(finding) for finding in compare_clocks(readings)}
    assert found.keys() == {"ahead", "behind"}
    assert "is 3.0 s ahead of that of the driver" in found["ahead"]
    assert "is 10.0 s behind that of the driver" in found["behind"]


@pytest.mark.parametrize("number", [2, 3, 4, 7, 8])
def test_rounds_have_each_pair_once_and_each_node_at_most_once_per_round(number):
    nodes = [str(index) for index in range(number)]
    found = rounds(nodes)
    pairs = [frozenset(pair) for pairs in found for pair in pairs]
    assert len(pairs) == len(set(pairs)) == number * (number - 1) // 2
    for pairs in found:
        members = [node for pair in pairs for node in pair]
        assert len(members) == len(set(members))
    assert len(found) == number - 1 + number % 2


def test_failed_link_is_an_error_and_a_slow_one_a_warning():
    links = {f"pair {index}": Link(backend="gloo", bytes_per_s=1e9) for index in range(3)}
    links |= {"slow": Link(backend="gloo", bytes_per_s=1e8), "broken": Link(error="Connection refused")}
    found = {finding.node: finding for finding in check_links(links)}
    assert found.keys() == {"slow", "broken"}
    assert found["broken"].is_error
    assert not found["slow"].is_error
    assert "0.10 GB/s in an all-reduce, and 1.00 GB/s between most nodes" in str(found["slow"])


def test_slow_pair_of_gpus_is_a_warning_that_names_the_command_for_their_topology():
    links = {f"GPU 0 to GPU {index}": Link(backend="nccl", bytes_per_s=3e11) for index in (1, 2, 3)}
    links["GPU 2 to GPU 3"] = Link(backend="nccl", bytes_per_s=2e10)
    (finding,) = check_links(links, "GPUs")
    assert str(finding).startswith(
        "GPU 2 to GPU 3: 20.00 GB/s in an all-reduce, and 300.00 GB/s between most GPUs; see "
    )
    assert not finding.is_error
