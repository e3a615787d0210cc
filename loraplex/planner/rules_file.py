"""The rules of a small surrogate as a file: to be read, or as Python that needs no other package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from loraplex.planner.features import FEATURE_NAMES, FEATURE_UNITS
from loraplex.planner.rules import rules_source, rules_text
from loraplex.planner.surrogate import Surrogate
from loraplex.planner.trees import Tree, tree_of

SUFFIX = ".py"
"""Files of this suffix get Python, others text."""


class _Part(NamedTuple):
    """One of a surrogate's trees. `function`: its name in Python."""

    heading: str
    function: str
    tree: Tree


def rules_as_text(surrogate: Surrogate) -> str:
    """Return the rules of both trees, one a line."""
    blocks = [[part.heading, *rules_text(part.tree, FEATURE_NAMES), ""] for part in _parts(surrogate)]
    return "\n".join(line for block in blocks for line in block)


def rules_as_python(surrogate: Surrogate) -> str:
    """Return a module with a function for each tree. `numba.njit` compiles them, though they need it not."""
    known = surrogate.trained_on
    profile = known.profile.replace('"', "'")  # it must not end the docstring
    lengths = f"{known.prompt_tokens:g} prompt and {known.output_tokens:g} answer tokens on average"
    return "\n".join(
        [
            f'"""Rules of a GPU with the profile {profile!r}, made by `loraplex plan train`.',
            "",
            f"Requests have {lengths}. Arguments:",
            "",
            *(f"{name}: {FEATURE_UNITS[name]}" for name in FEATURE_NAMES),
            '"""',
            *(
                f"\n\n# {part.heading}\n{rules_source(part.tree, FEATURE_NAMES, part.function)}".rstrip()
                for part in _parts(surrogate)
            ),
            "",
        ]
    )


def _parts(surrogate: Surrogate) -> Iterator[_Part]:
    assert surrogate.starvation is not None, "a surrogate of two small trees"
    yield _Part("tokens/s at most", "most_tok_s", tree_of(surrogate.throughput))
    yield _Part("starves", "starves", tree_of(surrogate.starvation))
