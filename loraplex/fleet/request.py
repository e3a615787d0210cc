"""A request as the fleet's deciding code sees it: nobody knows yet how long its answer will be."""

from __future__ import annotations

from typing import NamedTuple


class RoutedRequest(NamedTuple):
    """A request to be sent to a replica. `adapter`: None for the base model, whose `rank` is 0."""

    adapter: int | None
    rank: int
    prompt_tokens: int
