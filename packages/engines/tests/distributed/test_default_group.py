"""Engines of one process share the default group that the first one creates, in any order of closing."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from engine_cases import VOCAB, build_engine, make_batch, shard
from tidemill_testing import run_ranks, tiny_model
from tidemill_testing.ports import free_ports


def listening_addresses(port):
    """Return the addresses, as in /proc/net/tcp, at which this machine listens on a port."""
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    return [address.rpartition(":")[0] for address in listening if address.endswith(f":{port:04X}")]


def run_engines(path, port, backend):
    """Return the first loss of a reference after its policy was closed, and that of later engines."""
    dist.destroy_process_group()  # the default group of run_ranks
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    out = []
    for _ in range(3):
        policy = build_engine(path, backend=backend)
        reference = build_engine(path, optimizer=False)
        assert listening_addresses(port) == ["0100007F"]  # 127.0.0.1 alone
        rows = shard(policy, make_batch(6))
        expected = policy.infer_batch(rows)["log_probs"].values()
        policy.close()
        out.append((expected, reference.infer_batch(rows)["log_probs"].values()))
        reference.close()
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="must divide the world size 2"):
            build_engine(path, fsdp_size=3)
        assert not dist.is_initialized()
    return out


@pytest.mark.parametrize("backend", ["fsdp2", pytest.param("megatron", marks=pytest.mark.slow)])
def test_last_engine_destroys_default_group_and_new_engines_work(tmp_path, backend):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    for results in run_ranks(run_engines, 2, path, *free_ports(1), backend):
        for of_policy, of_reference in results:
            assert (of_policy - of_reference).abs().max() < 1e-5
