"""The documentation names files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATTERNS = ["*.md", "docs/*.md", "packages/*/*.md", "packages/*/docs/*.md", "testing/README.md"]
DOCS = [path for pattern in PATTERNS for path in ROOT.glob(pattern)]


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))
def test_links_and_paths_exist(doc):
    text = re.sub(r"^```.*?^```", "", doc.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = [doc.parent / target for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text)]
    paths = [ROOT / path for path in re.findall(r"`((?:packages|docs|recipes|bench|\.ci|\.github)/[\w./-]+)`", text)]
    missing = [str(path) for path in [*links, *paths] if not path.exists()]
    assert not missing


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))
def test_links_to_sections_exist(doc):
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([\w-]+)\)", doc.read_text())
    assert [f"{target}#{name}" for target, name in links if name not in _sections(doc.parent / target, doc)] == []


def _sections(page, doc):
    """The names of a page's sections, as GitHub makes them from headings."""
    text = re.sub(r"^```.*?^```", "", (page if page.is_file() else doc).read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
