from tidemill_trainer.doctor.room import Demand, check_room


def demand(key, num_processes, num_nodes=None, **resources):
    return Demand(key=key, num_processes=num_processes, num_nodes=num_nodes, resources=resources or {"CPU": 1.0})


def test_equal_shares_on_nodes_and_single_processes_anywhere_fit():
    nodes = {"a": {"CPU": 3.0}, "b": {"CPU": 2.0}}
    single = demand("rollout.num_engines", 2), demand("episode.num_workers", 1)
    assert check_room(nodes, [demand("actor.num_workers", 2, 2), *single]) == []
    gpus = {name: {"CPU": 16.0, "GPU": 8.0} for name in "abc"}
    workers = demand("actor.num_workers", 16, 2, CPU=1.0, GPU=1.0)
    assert check_room(gpus, [workers, demand("rollout.num_engines", 2, CPU=1.0, GPU=4.0)]) == []


def test_finding_has_what_each_node_lacks():
    nodes = {"a (10.0.0.1)": {"CPU": 8.0, "GPU": 8.0}, "b (10.0.0.2)": {"CPU": 8.0, "GPU": 2.0}}
    (finding,) = check_room(nodes, [demand("actor.num_workers", 16, 2, CPU=1.0, GPU=1.0)])
    assert str(finding).splitlines() == [
        "the cluster: no room for actor.num_workers=16: expected 8 CPU, 8 GPU on each of 2 nodes (trainer.nnodes), got "
        "these nodes:",
        "  a (10.0.0.1): 0 CPU, 0 GPU left for it, has its part",
        "  b (10.0.0.2): 8 CPU, 2 GPU left for it, 6 GPU missing; start Ray with more nodes, or with a larger "
        "--num-cpus, which is only the number of processes, or lower the number of processes",
    ]


def test_share_of_a_node_must_fit_on_one_node_even_if_the_cluster_has_enough():
    nodes = {"a": {"CPU": 3.0}, "b": {"CPU": 3.0}}
    (finding,) = check_room(nodes, [demand("actor.num_workers", 4, 1)])
    assert "expected 4 CPU on each of 1 nodes" in finding.cause


def test_resources_of_earlier_processes_are_not_counted_twice():
    required = [demand("actor.num_workers", 1, 1), demand("rollout.num_engines", 2)]
    (finding,) = check_room({"a": {"CPU": 2.0}}, required)
    assert "no room for rollout.num_engines=2, only for 1 of them: expected 1 CPU on one node for each" in finding.cause
    assert "a: 0 CPU left for it, 1 CPU missing" in finding.cause


def test_number_of_small_processes_that_fit_is_named():
    (finding,) = check_room({"a": {"CPU": 63 / 64}}, [demand("engines to add", 100_000, CPU=1 / 64)])
    assert finding.cause.splitlines() == [
        "no room for engines to add=100000, only for 63 of them: expected 0.016 CPU on one node for each, got these "
        "nodes:",
        "  a: 0 CPU left for it, 0.016 CPU missing",
    ]
