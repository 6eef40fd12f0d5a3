"""Monkeypatches that are active while a context is open."""

from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")

from tidemill_engines.megatron.patches.monkeypatch import Attributes, Monkeypatch


def _patch(attributes: Attributes, owner: SimpleNamespace) -> None:
    attributes.replace(owner, "value", 2)
    attributes.replace(owner, "added", 3)


def test_patch_is_active_until_the_last_context_closes():
    owner = SimpleNamespace(value=1)
    patched = Monkeypatch(lambda attributes: _patch(attributes, owner))
    outer, inner = patched(), patched()
    outer.__enter__()
    assert vars(owner) == {"value": 2, "added": 3}
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert vars(owner) == {"value": 2, "added": 3}
    inner.__exit__(None, None, None)
    assert vars(owner) == {"value": 1}


def test_patch_that_fails_is_undone():
    owner = SimpleNamespace(value=1)

    def fail(attributes: Attributes) -> None:
        _patch(attributes, owner)
        raise ImportError("no megatron-core")

    with pytest.raises(ImportError, match="no megatron-core"), Monkeypatch(fail)():
        pass
    assert vars(owner) == {"value": 1}
