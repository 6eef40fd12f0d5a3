"""Release check: every package builds, has complete metadata, and works when it is installed alone."""

import email.message
import email.parser
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tidemill_testing import tiny_model
from tidemill_testing.sglang_server import sglang_server
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("release")]

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
PLAIN = "{example}"
# The example of weight_update begins where a trainer has a model and an engine.
WITH_ENGINE_AND_MODEL = """
import sglang
import transformers
from tidemill_weight_update.sglang import sglang_launch_args

if __name__ == "__main__":
    engine = sglang.Engine(model_path="path/to/model", skip_tokenizer_init=True, max_total_tokens=1024,
                           **sglang_launch_args())
    model = transformers.AutoModelForCausalLM.from_pretrained("path/to/model")
{indented}
    engine.shutdown()
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Install:
    """How a package is installed and what is run: the first Python block of its README, inside of `script`.

    Attributes:
        extra: extra of the package that its example uses.
        needs: other packages of the workspace, installed from their wheels as well.
        output: pattern that the example prints.
        has_server: an SGLang server runs, from the environment of the workspace.
    """

    extra: str = ""
    needs: tuple[str, ...] = ()
    script: str = PLAIN
    output: str = ""
    has_server: bool = False


INSTALLS = {
    "rollout": Install(has_server=True, output=r"\d+ trained tokens: \["),
    "algorithms": Install(needs=("dataproto",), output=r"mean reward 0\.0\d at first, [01]\.\d\d after"),
    "dataproto": Install(),
    "dispatch": Install(extra="[ray]", output=r"\[1, 4, 9, 16, 25\]"),
    "engines": Install(needs=("dataproto",), output=r"'loss': \d"),
    "sglang_cpu": Install(output=r"\[\d+(, \d+)*\] \[-\d"),
    "weight_update": Install(
        extra="[sglang]", needs=("sglang_cpu",), script=WITH_ENGINE_AND_MODEL, output=r"\d+ tensors, \d+ bytes"
    ),
    "trainer": Install(extra="[cpu]", needs=tuple(name for name in PACKAGES if name != "trainer"), script=""),
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheel of each package, built from its source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    built = {}
    for package in PACKAGES:
        run("uv", "build", "--quiet", "--out-dir", str(folder / package), f"packages/{package}", cwd=ROOT)
        [built[package]] = (folder / package).glob("*.whl")
        assert len(list((folder / package).glob("*.tar.gz"))) == 1
    return built


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    """Empty virtual environment. uv links files from its cache, so an installation of 9 GB needs little disk."""
    folder = tmp_path / "environment"
    run("uv", "venv", "--quiet", "--python", sys.executable, str(folder), cwd=tmp_path)
    yield folder
    shutil.rmtree(folder)


def run(*command: str, cwd: Path) -> str:
    """Run a command outside of the workspace's environment and return its output."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.parser.BytesParser().parsebytes(archive.read(name))


def test_all_packages_are_covered():
    assert sorted(INSTALLS) == PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_metadata_matches_the_project_and_bounds_requirements(wheels, package):
    metadata = metadata_of(wheels[package])
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    assert metadata["Name"] == f"tidemill-{package.replace('_', '-')}" == project["name"]
    assert metadata["Version"] == project["version"]
    assert f"\n## {metadata['Version']} " in (ROOT / "packages" / package / "CHANGELOG.md").read_text()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == "<3.14,>=3.11"
    assert metadata["Summary"]
    assert str(metadata.get_payload()).startswith(f"# {metadata['Name']}\n")
    for requirement in map(Requirement, metadata.get_all("Requires-Dist", [])):
        operators = {specifier.operator for specifier in requirement.specifier}
        assert ">=" in operators, f"{requirement} has no lower bound"
        if requirement.name.startswith("tidemill"):
            assert "<" in operators, f"{requirement} has no upper bound"


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_contains_the_package_alone(wheels, package):
    with zipfile.ZipFile(wheels[package]) as archive:
        names = archive.namelist()
    assert f"tidemill_{package}/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {f"tidemill_{package}"}


@pytest.mark.parametrize("package", PACKAGES)
def test_readme_example_runs_where_only_the_package_is_installed(wheels, environment, tmp_path, package):
    install = INSTALLS[package]
    others = [str(wheels[name]) for name in install.needs]
    run(
        *("uv", "pip", "install", "--quiet", "--python", str(environment), "--constraint", "requirements.lock"),
        *(f"{wheels[package]}{install.extra}", *others),
        cwd=ROOT,
    )
    installed = set(re.findall(r"^tidemill-(\w+(?:-\w+)*)", freeze(environment), re.MULTILINE))
    assert {name.replace("-", "_") for name in installed} == {package, *install.needs}
    if package == "trainer":
        short = ["warmup.max_steps=2", "trainer.total_steps=1", "data.train_batch_size=8", "trainer.test_freq=0"]
        output = run(str(environment / "bin" / "tidemill"), "demo", *short, cwd=tmp_path)
        assert (tmp_path / "runs").is_dir(), output
        return
    example = (ROOT / "packages" / package / "README.md").read_text().split("```python\n")[1].split("```")[0]
    script = install.script.format(example=example, indented=textwrap.indent(example, "    "))
    model = tiny_model(tmp_path / "model", "qwen3", vocab_size=512)
    write_tokenizer(model)
    script = re.sub(r'"path/to/\w+"', repr(str(model)), script)
    plain = {"api_key": None, "skip_tokenizer_init": False}
    with sglang_server(model, **plain) if install.has_server else nullcontext(("", None)) as (url, _):
        (tmp_path / "example.py").write_text(script.replace("http://127.0.0.1:30000", url))
        output = run(str(environment / "bin" / "python"), "example.py", cwd=tmp_path)
    assert re.search(install.output, output), output


def write_tokenizer(model: Path) -> None:
    """Write a byte-level tokenizer with 512 tokens and a chat template to the folder of a model."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=ByteLevel.alphabet())
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    template = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    template += "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template)
    fast.save_pretrained(model)


def freeze(environment: Path) -> str:
    return run("uv", "pip", "freeze", "--quiet", "--python", str(environment), cwd=ROOT)
