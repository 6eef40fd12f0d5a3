import dataclasses
import json
from pathlib import Path
from typing import get_type_hints

import pytest
from tidemill_trainer.algorithm_config import AlgorithmConfig, CriticConfig
from tidemill_trainer.config import Config
from tidemill_trainer.config_keys import BACKENDS, section_in
from tidemill_trainer.sft.config import SFTConfig

_PAGE = (Path(__file__).parents[1] / "docs/configuration.md").read_text()


def _toml(value):
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value) if isinstance(value, str | bool | dict) else str(value)


def _defaults(cls, prefix=""):
    """Yield key and default of each field of a section."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if cls is AlgorithmConfig and field.name == "options":  # further keys of the section
            continue
        section = section_in(hints[field.name])
        has_section = section is not None and "tuple" not in str(hints[field.name])
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if prefix == "" and (cls, field.name) == (CriticConfig, "optimizer"):  # in its own section
            yield "optimizer.lr", _toml(default.lr)
        elif has_section:
            yield from _defaults(section, f"{prefix}{field.name}.")
        if not has_section or default is None:
            yield f"{prefix}{field.name}", "required" if default is dataclasses.MISSING else _toml(default)


def _sections():
    hints = get_type_hints(Config)
    for field in dataclasses.fields(Config):
        if field.name == "engine":
            yield from ((f'`[engine]` with `backend = "{name}"`', cls) for name, cls in BACKENDS.items())
        else:
            yield f"`[{field.name}]`", section_in(hints[field.name])
    hints = get_type_hints(SFTConfig)
    for name in ("data", "dpo", "actor", "trainer"):  # the others are those of `Config`
        yield f"`[{name}]` of `tidemill sft`", section_in(hints[name])


@pytest.mark.parametrize(("title", "cls"), list(_sections()))
def test_reference_lists_every_key_with_its_default(title, cls):
    section = _PAGE.split(f"# {title}\n", 1)[1].split("\n#", 1)[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert {row[0].strip("| `"): row[1].strip("`") for row in rows} == dict(_defaults(cls))
