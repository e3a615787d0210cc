"""The picture of the architecture shows all parts, and its texts are inside their boxes in a wide font."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

PICTURE: Final = Path(__file__).parent.parent / "docs" / "architecture.svg"
_SVG: Final = "{http://www.w3.org/2000/svg}"
_MARGIN: Final = 2.0


class Box(NamedTuple):
    x0: float
    y0: float
    x1: float
    y1: float


class Line(NamedTuple):
    text: str
    size: float
    is_bold: bool
    x: float
    y: float

    @property
    def width(self) -> float:
        """Its width in DejaVu Sans, which is wider than what browsers use as sans-serif."""
        font = FontProperties(family="DejaVu Sans", weight="bold" if self.is_bold else "normal")
        return float(TextPath((0, 0), self.text, size=self.size, prop=font).get_extents().x1)

    def within(self, boxes: list[Box]) -> Box:
        """Return the smallest box that it begins in."""
        around = [box for box in boxes if box.x0 <= self.x <= box.x1 and box.y0 <= self.y <= box.y1]
        return min(around, key=lambda box: (box.x1 - box.x0) * (box.y1 - box.y0))


def drawn(source: str) -> tuple[list[Box], list[Line]]:
    """Return the boxes and the lines of text of a picture."""
    root = ElementTree.fromstring(source)
    styles = dict(re.findall(r"\.(\w+) \{([^}]*)\}", source))
    boxes = []
    for rect in root.iter(f"{_SVG}rect"):
        x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        boxes.append(Box(x, y, x + width, y + height))
    lines = []
    for text in root.iter(f"{_SVG}text"):
        style = styles[text.attrib["class"]]
        size = re.search(r"font-size: (\d+)px", style)
        assert size is not None
        place = float(text.attrib["x"]), float(text.attrib["y"])
        lines.append(Line("".join(text.itertext()), float(size[1]), "bold" in style, *place))
    return boxes, lines


def overflowing(source: str) -> list[str]:
    """Return the texts that leave the box that they begin in."""
    boxes, lines = drawn(source)
    found = []
    for line in lines:
        box = line.within(boxes)
        if line.x + line.width > box.x1 - _MARGIN or line.y - line.size < box.y0 or line.y + 4 > box.y1:
            found.append(line.text)
    return found


def test_every_text_is_inside_its_box() -> None:
    assert overflowing(PICTURE.read_text(encoding="utf-8")) == []


def test_a_text_that_is_too_long_is_noticed() -> None:
    source = PICTURE.read_text(encoding="utf-8").replace("HTTP API", "HTTP API " * 5)
    assert overflowing(source) == ["HTTP API " * 5]


@pytest.mark.parametrize("part", ["S3", "Planner", "Twin", "CPU engine", "GPU engine", "Fleet controller"])
def test_all_parts_are_in_the_picture(part: str) -> None:
    assert any(part.lower() in line.text.lower() for line in drawn(PICTURE.read_text(encoding="utf-8"))[1])
