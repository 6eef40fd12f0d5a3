import os
import shutil

import pytest
from tidemill_testing.tiny import tiny_model
from tidemill_trainer.doctor.comparisons import differing
from tidemill_trainer.doctor.facts import digests, read_facts, read_gpus


def test_facts_of_this_machine_are_complete():
    facts = read_facts(None, None)
    assert facts.interface is not None
    assert facts.versions["tidemill-trainer"] != "none"
    assert facts.num_cpus >= 1
    assert facts.open_files >= 1
    assert facts == read_facts(None, None)


def test_digests_of_a_model_differ_if_header_size_or_config_differ(tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3")
    copies = [shutil.copytree(model, tmp_path / f"copy{number}") for number in range(4)]
    header = bytearray((copies[1] / "model.safetensors").read_bytes())
    header[20] ^= 1
    (copies[1] / "model.safetensors").write_bytes(header)
    with (copies[2] / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    (copies[3] / "config.json").write_text((copies[3] / "config.json").read_text().replace("qwen3", "qwen4"))
    expected = digests(model)
    assert [differing(expected, digests(copy)) for copy in copies] == [
        [],
        ["model.safetensors"],
        ["model.safetensors"],
        ["config.json"],
    ]


def test_model_that_cannot_be_read_is_described(tmp_path):
    assert digests(tmp_path / "absent") == f"found no config.json in {tmp_path / 'absent'}"


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1, 2]), ("", []), ("2", [2]), ("1, 0", [0, 1]), ("GPU-c", [2]), ("GPU-a1,GPU-b", [0, 1])],
)
def test_hidden_gpus_are_left_out(monkeypatch, tmp_path, visible, indices):
    """The output is that of nvidia-smi on a machine with three GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncase $1 in --query-gpu*)\nfor gpu in 0,GPU-a1 1,GPU-b1 2,GPU-c1; do echo $gpu,9,5; done\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert [gpu.index for gpu in read_gpus(visible=visible)] == indices


def test_rows_of_nvidia_smi_that_are_no_gpus_or_processes_are_left_out(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncase $1 in --query-gpu*)\necho 0,GPU-a,9,5; echo Unable to determine the handle of a GPU;;\n"
        '*) echo "GPU-a, 17, python -c a, b"; echo "GPU-a, [N/A], [Not Found]"; echo no rows;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    [gpu] = read_gpus()
    assert (gpu.index, gpu.processes) == (0, ((17, "python -c a, b"),))
