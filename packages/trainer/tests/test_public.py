import subprocess
import sys

import tidemill_trainer
from tidemill_trainer import cli, demo


def test_public_names():
    assert tidemill_trainer.__all__ == ["main"]
    assert tidemill_trainer.main is cli.main
    assert demo.__all__ == ["write_assets"]


def test_import_does_not_load_torch_ray_sglang_or_transformers():
    code = "import sys, tidemill_trainer; print(*sorted({'torch', 'ray', 'sglang', 'transformers'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""


def test_commands_check_their_inputs_before_ray_is_imported():
    """Ray reads when it is imported whether it listens on the loopback address alone."""
    modules = ("run", "inputs", "evaluate", "sft.inputs", "replay.plan")
    code = "\n".join(
        ["import sys", *(f"import tidemill_trainer.{name}" for name in modules), "print('ray' in sys.modules)"]
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
