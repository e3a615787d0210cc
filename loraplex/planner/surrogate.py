"""A trained surrogate: predicts throughput and starvation of a GPU within microseconds, where the twin takes
about a tenth of a second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from loraplex.perf.slot_profile import SlotProfile
from loraplex.planner.demand import AdapterDemand, PlanError
from loraplex.planner.features import MAX_SIZE, PAPER_FEATURES, SUM_RATE, Features, slot_features
from loraplex.planner.fingerprint import fingerprint
from loraplex.planner.judge import Verdict
from loraplex.planner.plan import slot_rank
from loraplex.planner.trained_on import TrainedOn
from loraplex.planner.trees import Forest, forest_value
from loraplex.twin.outcome import STARVED_BELOW
from loraplex.twin.slot_state import Flags, Floats

STARVED_ABOVE: Final = 0.5
"""Value of the starvation forest, the share of its trees' votes, above which a GPU starves."""
_LENGTHS_WITHIN: Final = 0.05
"""Relative difference of mean lengths up to which a surrogate will do: about its own error."""


class Predicted(NamedTuple):
    """`outside`: the features that are outside the range that was trained on; the prediction is then one for
    the nearest values that were."""

    throughput_tok_s: float
    is_starved: bool
    outside: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Surrogate:
    """Forests for one profile and length of requests. `ranges`: least and greatest value of each of the
    paper's features in training, one row per feature. `throughput`: what a GPU serves, if so much is offered;
    the logarithm of it if `in_logarithms`. `starvation`: share of votes that it starves; None if that follows
    from the throughput. `accuracy`: by measure, on runs not trained on, for people."""

    trained_on: TrainedOn
    ranges: Floats
    throughput: Forest
    starvation: Forest | None
    in_logarithms: bool = False
    accuracy: Mapping[str, float] = field(default_factory=dict)

    def predict(self, features: Features) -> Predicted:
        most_tok_s, outside = _predict(self.throughput, self.ranges, features)
        if self.in_logarithms:
            most_tok_s = math.exp(most_tok_s)
        offered_tok_s = self.trained_on.request_tokens * float(features[SUM_RATE])
        if self.starvation is None:
            is_starved = most_tok_s < STARVED_BELOW * offered_tok_s
        else:
            is_starved = self.starvation.value(features) > STARVED_ABOVE
        names = self._named(outside) if outside else ()
        return Predicted(min(most_tok_s, offered_tok_s), is_starved, names)

    def predict_all(self, features: npt.NDArray[np.float32]) -> tuple[Floats, Flags]:
        """Return the throughput and whether a GPU starves, of many queries, one per row."""
        most_tok_s = self.throughput.values(features)
        if self.in_logarithms:
            most_tok_s = np.exp(most_tok_s)
        offered_tok_s = self.trained_on.request_tokens * features[:, SUM_RATE].astype(np.float64)
        if self.starvation is None:
            is_starved = most_tok_s < STARVED_BELOW * offered_tok_s
        else:
            is_starved = self.starvation.values(features) > STARVED_ABOVE
        return np.minimum(most_tok_s, offered_tok_s), is_starved

    def _named(self, outside: int) -> tuple[str, ...]:
        return tuple(name for place, name in enumerate(PAPER_FEATURES) if outside >> place & 1)


@numba.njit(cache=True, nogil=True)
def _predict(throughput, ranges, features):  # type: ignore[no-untyped-def]
    outside = 0
    for place in range(len(ranges)):
        if not ranges[place, 0] <= features[place] <= ranges[place, 1]:
            outside |= 1 << place
    return forest_value(throughput, features), outside


class SurrogateJudge:
    """Judges GPUs by a surrogate. Queries outside the training range are answered, and remembered: ask
    `outside_range` afterwards."""

    def __init__(
        self, surrogate: Surrogate, profile: SlotProfile, *, prompt_tokens: float, output_tokens: float
    ) -> None:
        """`prompt_tokens`, `output_tokens`: mean of the requests to be served. Raises PlanError if the
        surrogate is of another profile or of other lengths."""
        check_profile(surrogate, profile)
        _check_lengths(surrogate.trained_on, prompt_tokens, output_tokens)
        self._surrogate = surrogate
        self._memory = profile.memory
        self._outside: dict[str, tuple[float, float]] = {}

    def judge(self, adapters: Sequence[AdapterDemand], num_slots: int | None) -> Verdict:
        assert num_slots is not None, "an engine with slots"
        if not adapters:
            return Verdict(0.0, False)
        features = slot_features(adapters, num_slots)
        if not self.fits(int(features[MAX_SIZE]), num_slots):
            return Verdict(0.0, True)
        found = self._surrogate.predict(features)
        if found.outside:
            self._remember(features, found.outside)
        return Verdict(found.throughput_tok_s, found.is_starved)

    def fits(self, max_rank: int, num_slots: int) -> bool:
        return self._memory.predict(num_slots=num_slots, max_rank=slot_rank(max_rank)) > 0

    def outside_range(self) -> list[str]:
        """Return in words what was asked for outside the training range; nothing if all was within."""
        names, ranges = PAPER_FEATURES, self._surrogate.ranges
        return [
            f"{name} {_span(*self._outside[name])}, trained on {_span(*ranges[place].tolist())}"
            for place, name in enumerate(names)
            if name in self._outside
        ]

    def _remember(self, features: Features, outside: Sequence[str]) -> None:
        for name in outside:
            value = float(features[PAPER_FEATURES.index(name)])
            least, most = self._outside.get(name, (value, value))
            self._outside[name] = min(least, value), max(most, value)


def check_profile(surrogate: Surrogate, profile: SlotProfile) -> None:
    """Raise PlanError if the surrogate was trained on another profile."""
    trained_on = surrogate.trained_on
    if trained_on.profile_sha256 != fingerprint(profile):
        raise PlanError(
            f"the surrogate was trained on the profile {trained_on.profile} ({trained_on.model}, "
            f"{trained_on.hardware}), which is not, or no longer, the given one ({profile.model}, "
            f"{profile.hardware}); give that profile, or train one on this with `loraplex plan train`"
        )


def _check_lengths(trained_on: TrainedOn, prompt_tokens: float, output_tokens: float) -> None:
    known = np.array((trained_on.prompt_tokens, trained_on.output_tokens))
    asked = np.array((prompt_tokens, output_tokens))
    if not (abs(asked - known) <= _LENGTHS_WITHIN * known).all():
        raise PlanError(
            f"the surrogate was trained on requests of {known[0]:g} prompt and {known[1]:g} answer tokens, "
            f"these have {prompt_tokens:g} and {output_tokens:g} on average; train one for them with "
            "`loraplex plan train`"
        )


def _span(least: float, most: float) -> str:
    return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"
