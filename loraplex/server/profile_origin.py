"""Tells where the profile of a running engine comes from."""

from __future__ import annotations


def package_profile_name(costs: str) -> str | None:
    """Return the name of the profile in the package that an engine goes by, given the costs that it reports,
    as JSON; None if they were measured on its own machine, or guessed."""
    # Imported here: only a server whose engine has a measured profile needs to know.
    from loraplex.perf.cost_model import CostModel
    from loraplex.perf.named_profiles import named_profiles
    from loraplex.perf.profile_json import profile_from_json

    found = profile_from_json(costs)
    return next(
        (
            name
            for name, each in named_profiles().items()
            # An engine adds its own memory to the profile; the costs of its steps stay as they were measured.
            if isinstance(each, CostModel) and each.subject == found.subject and each.step == found.step
        ),
        None,
    )
