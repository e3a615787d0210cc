"""Links of the documents lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    text = _CODE.sub("", document.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for path, anchor in _LINK.findall(document.read_text(encoding="utf-8")):
        target = document.parent / path if path else document
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target), f"{path}#{anchor}"


def test_the_pattern_finds_links() -> None:
    assert ("docs/planner.md", "") in _LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
