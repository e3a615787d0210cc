"""Check that pictures are as a person expects them: named axes, and text that does not cover other text.

`readable_pictures` checks every picture that a test saves, in the folders whose conftest.py imports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox


@pytest.fixture(autouse=True)
def readable_pictures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that saves a picture which cannot be read."""
    found: list[str] = []
    save = Figure.savefig

    def savefig(figure: Figure, *args: Any, **options: Any) -> None:
        save(figure, *args, **options)
        found.extend(problems_of(figure))

    monkeypatch.setattr(Figure, "savefig", savefig)
    yield
    assert not found


def problems_of(figure: Figure) -> list[str]:
    """Return what is missing from a figure that was drawn, or covers something else."""
    found = []
    titles = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
    if not any(titles):
        found.append("the picture has no title")
    for number, axes in enumerate(figure.axes):
        found += [f"panel {number}: {problem}" for problem in _problems_of_panel(axes)]
    headings = [axes.title for axes in figure.axes if axes.title.get_text()]
    for one, other in combinations(headings, 2):
        if _box(one).overlaps(_box(other)):
            found.append(f"the titles {one.get_text()!r} and {other.get_text()!r} overlap")
    return found


def _problems_of_panel(axes: Axes) -> Iterator[str]:
    if axes.get_label() == "<colorbar>":
        return
    for axis, name in ((axes.xaxis, "x"), (axes.yaxis, "y")):
        labels = [label for label in axis.get_ticklabels() if label.get_text() and label.get_visible()]
        # Names at the ticks say what the axis is; so does the neighbour's label where panels share an axis.
        is_named = bool(axis.label.get_text()) or any(not _is_number(each.get_text()) for each in labels)
        is_shared = len(axes.get_shared_y_axes().get_siblings(axes)) > 1 and name == "y"
        if labels and not is_named and not is_shared:
            yield f"the {name} axis has no label"
        for one, other in pairwise(sorted(labels, key=lambda each: _box(each).x0 + _box(each).y0)):
            if _box(one).overlaps(_box(other)):
                yield f"the {name} ticks {one.get_text()!r} and {other.get_text()!r} overlap"


def _box(text: Text) -> Bbox:
    # A little smaller: boxes have a margin.
    return text.get_window_extent().padded(-1.0)


def _is_number(text: str) -> bool:
    return any(each.isdigit() for each in text)
