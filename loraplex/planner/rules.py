"""A small tree written out: as rules for people, and as Python that is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from loraplex.planner.trees import Tree

_DIGITS: Final = 4
"""Significant digits that people read; the source has all of them."""


def rules_text(tree: Tree, names: Sequence[str], value_text: Callable[[str], str] = str) -> list[str]:
    """Return one line per rule: "sum_rate <= 23.5 and adapter_slots > 144 -> 3071". `value_text`: how the
    number of a leaf reads."""
    return [
        f"{' and '.join(_merged(conditions, names)) or 'always'} -> "
        + value_text(f"{leaf.number:.{_DIGITS}g}")
        for conditions, leaf in _rules(tree, ())
    ]


def rules_source(tree: Tree, names: Sequence[str], function: str) -> str:
    """Return Python of a function that takes the features by name, and computes what the tree does."""
    assert all(each.isidentifier() for each in (*names, function))
    body = "\n".join(_statements(tree, names, 1))
    return f"def {function}({', '.join(names)}):\n{body}\n"


def compiled_rules(source: str, function: str) -> Callable[..., float]:
    """Compile what `rules_source` returned. It takes the features as numbers, in their order."""
    import numba

    found: dict[str, Any] = {}
    exec(compile(source, f"<{function}>", "exec"), found)
    compiled: Callable[..., float] = numba.njit(found[function])
    return compiled


Condition = tuple[int, bool, float]
"""Feature, whether it is at most the threshold (otherwise above it), and the threshold."""


def _rules(tree: Tree, above: tuple[Condition, ...]) -> Iterator[tuple[tuple[Condition, ...], Tree]]:
    if tree.left is None or tree.right is None:
        yield above, tree
        return
    yield from _rules(tree.left, (*above, (tree.feature, True, tree.number)))
    yield from _rules(tree.right, (*above, (tree.feature, False, tree.number)))


def _merged(conditions: Sequence[Condition], names: Sequence[str]) -> list[str]:
    """Return the text of the conditions, of each feature only the strictest ones."""
    least: dict[int, float] = {}
    most: dict[int, float] = {}
    for feature, is_at_most, number in conditions:
        if is_at_most:
            most[feature] = min(number, most.get(feature, number))
        else:
            least[feature] = max(number, least.get(feature, number))
    texts = []
    for feature in sorted({*least, *most}):
        text = names[feature]
        if feature in least and feature in most:
            text = f"{least[feature]:.{_DIGITS}g} < {text}"
        elif feature in least:
            text = f"{text} > {least[feature]:.{_DIGITS}g}"
        if feature in most:
            text = f"{text} <= {most[feature]:.{_DIGITS}g}"
        texts.append(text)
    return texts


def _statements(tree: Tree, names: Sequence[str], depth: int) -> Iterator[str]:
    pad = "    " * depth
    if tree.left is None or tree.right is None:
        yield f"{pad}return {tree.number!r}"
        return
    yield f"{pad}if {names[tree.feature]} <= {tree.number!r}:"
    yield from _statements(tree.left, names, depth + 1)
    yield from _statements(tree.right, names, depth)
