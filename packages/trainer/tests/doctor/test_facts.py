import shutil

from tidemill_testing.tiny import tiny_model
from tidemill_trainer.doctor.comparisons import differing
from tidemill_trainer.doctor.facts import digests, read_facts


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
