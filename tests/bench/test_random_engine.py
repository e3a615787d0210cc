"""Engines with random weights."""

from __future__ import annotations

from loraplex.bench.random_engine import random_specs


def test_a_version_names_the_content_as_that_of_a_real_adapter_does() -> None:
    made = [
        spec
        for ranks, modules in (([4], "q"), ([8], "q"), ([8], "q,v"))
        for spec in random_specs("same", "tiny", num_adapters=2, ranks=ranks, modules=modules)
    ]
    assert len({spec.version for spec in made}) == len(made)
    again = random_specs("same", "tiny", num_adapters=1, ranks=[8], modules="q,v")
    assert again == made[4:5]
