"""Conditions under which the plugin is active."""

import subprocess
import sys

import pytest
import tidemill_sglang_cpu
from tidemill_sglang_cpu import activation

PLATFORM = "tidemill_sglang_cpu.platform:CpuPlatform"


@pytest.fixture
def machine(monkeypatch):
    """`machine(gpu=..., choice=..., own_mode=...)`: set the conditions that `activate` reads."""

    def set_up(*, gpu=False, choice=None, own_mode=False):
        monkeypatch.setattr(activation, "accelerator_is_usable", lambda: gpu)
        monkeypatch.delenv(activation.ENV_NAME, raising=False)
        monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
        if choice is not None:
            monkeypatch.setenv(activation.ENV_NAME, choice)
        if own_mode:
            monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")

    return set_up


def test_public_names():
    assert tidemill_sglang_cpu.__all__ == ["activate"]


@pytest.mark.parametrize(
    ("gpu", "choice", "own_mode", "expected"),
    [
        (False, None, False, PLATFORM),
        (True, None, False, None),
        (False, None, True, None),
        (False, "0", False, None),
        (True, "1", False, PLATFORM),
        (False, "1", True, PLATFORM),
        (True, "yes", False, PLATFORM),
    ],
)
def test_plugin_is_active_only_without_a_gpu_or_when_required(machine, gpu, choice, own_mode, expected):
    machine(gpu=gpu, choice=choice, own_mode=own_mode)
    assert tidemill_sglang_cpu.activate() == expected


@pytest.mark.parametrize("choice", ["yes", "", "2"])
def test_unknown_value_is_refused(machine, choice):
    machine(choice=choice)
    with pytest.raises(ValueError, match="TIDEMILL_SGLANG_CPU must be"):
        activation.check_environment()


def test_forcing_the_cpu_with_a_visible_gpu_is_refused(machine):
    machine(gpu=True, choice="1")
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES"):
        activation.check_environment()


@pytest.mark.parametrize("choice", [None, "0", "1"])
def test_valid_values_of_the_variable_are_accepted(machine, choice):
    machine(choice=choice)
    activation.check_environment()


def test_import_loads_neither_torch_nor_sglang():
    code = (
        "import sys, tidemill_sglang_cpu;"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'sglang', 'transformers'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_unknown_value_stops_sglang(tmp_path):
    """SGLang ignores errors of activate(), so the error must be raised later."""
    code = "from sglang.srt.platforms import current_platform; print(current_platform)"
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), activation.ENV_NAME: "maybe"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode != 0
    assert "ValueError: TIDEMILL_SGLANG_CPU must be" in done.stderr
