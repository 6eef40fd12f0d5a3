import pytest
from tidemill_trainer.doctor.facts import NodeFacts

_MODEL = {"config.json": "a", "model.safetensors": "b"}


@pytest.fixture
def make_node():
    """`make_node(1, field=...)`: the facts of a node without problems, except those that are given."""

    def make(number=0, **facts):
        address = f"10.0.0.{number}"
        healthy = {
            "name": f"node{number} ({address})",
            "address": address,
            "interface": "eth0",
            "versions": {"python": "3.11.7", "torch": "2.11.0"},
            "source": "123",
            "model": _MODEL,
            "num_cpus": 8,
            "shared_memory_bytes": 16 << 30,
            "open_files": 65536,
        }
        return NodeFacts(**(healthy | facts))

    return make
