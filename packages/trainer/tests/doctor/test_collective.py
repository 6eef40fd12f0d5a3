import pytest
import torch
from tidemill_trainer.doctor.collective import measure_devices, measure_gpus


def test_all_pairs_of_devices_of_a_node_are_measured():
    links = measure_devices(["cpu"] * 3)
    assert links.keys() == {"GPU 0 to GPU 1", "GPU 0 to GPU 2", "GPU 1 to GPU 2"}
    for link in links.values():
        assert (link.backend, link.error) == ("gloo", "")
        assert link.latency_s > 0
        assert link.bytes_per_s > 0


def test_device_that_fails_ends_the_measurement_with_its_error():
    (link,) = measure_devices(["meta", "meta"]).values()
    assert link.error


def test_one_device_has_no_pairs():
    assert measure_devices(["cpu"]) == {}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="requires two GPUs")
def test_gpus_of_a_node_are_measured_by_nccl():
    links = measure_gpus()
    assert {link.backend for link in links.values()} == {"nccl"}, links
