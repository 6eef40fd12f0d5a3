"""The warning about a megatron-core that the patches were not written for, and what each patch documents."""

import pkgutil
import re
import warnings
from importlib import import_module

import pytest

pytest.importorskip("megatron.core")

import megatron.core
from tidemill_engines.megatron import patches
from tidemill_engines.megatron.patches.version import PATCHED_VERSION, warn_unless_patched_version

HELPERS = {"compiled", "context", "monkeypatch", "version"}
HEADINGS = ("Upstream does:", "Problem:", "Seen in:", "Remove when:")


def test_another_megatron_core_is_warned_about_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            warn_unless_patched_version("0.99.0")
    [warning] = caught
    assert re.search(
        rf"written for megatron-core {PATCHED_VERSION}, but megatron-core 0.99.0 is installed.* Install "
        rf"megatron-core=={PATCHED_VERSION}, or run the engine's tests",
        str(warning.message),
    )


def test_apply_patches_checks_the_installed_version(monkeypatch):
    import torch
    from tidemill_engines.megatron.patches.context import apply_patches

    monkeypatch.setattr(megatron.core, "__version__", "0.98.0")
    with pytest.warns(UserWarning, match="0.98.0 is installed"), apply_patches(torch.device("cpu")):
        pass
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unless_patched_version(megatron.core.__version__)


@pytest.mark.parametrize("name", sorted({module.name for module in pkgutil.iter_modules(patches.__path__)} - HELPERS))
def test_each_patch_documents_what_it_changes_and_why(name):
    text = import_module(f"{patches.__name__}.{name}").__doc__ or ""
    positions = [text.find(f"\n{heading}\n") for heading in HEADINGS]
    assert positions == sorted(positions)
    assert min(positions) > 0
    assert f"megatron-core {PATCHED_VERSION}" in text
    assert f"`{name}`" in (patches.__doc__ or "")
