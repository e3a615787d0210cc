"""Watches predictions beside what was measured, and corrects the model where they part for good.

Machines change under a profile: a neighbour takes memory bandwidth, a device lowers its clocks. What is
watched is the ratio of measured to predicted, as a logarithm, so that twice and half weigh alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log
from typing import Final, NamedTuple

from loraplex.perf.cost_model import CostKind, CostModel

_MAX_RATIO: Final = 4.0
"""A single pause, of a collector or of the machine, counts as no more than this."""
_MAX_CORRECTION: Final = 1000.0
_FADING: Final = 0.999


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftConfig:
    """`smoothing`: the weight of the newest ratio in their running mean. `bound`: predictions within a factor
    of this are good enough. `patience`: how many times in a row the mean must be beyond it."""

    smoothing: float = 0.1
    bound: float = 1.3
    patience: int = 20

    def __post_init__(self) -> None:
        assert 0 < self.smoothing <= 1
        assert self.bound > 1
        assert self.patience >= 1


class PredictedAndMeasured(NamedTuple):
    """Seconds of the same steps or copies."""

    predicted_s: float
    measured_s: float


@dataclass(slots=True)
class _Watch:
    """Of one cost, since it was last corrected."""

    mean_log_ratio: float = 0.0
    num_seen: int = 0
    num_beyond: int = 0


class DriftWatch:
    """Owns the current model; whoever predicts asks for `model` each time."""

    def __init__(self, model: CostModel, config: DriftConfig | None = None) -> None:
        self._config = config or DriftConfig()
        self._model = model
        self._watches = {kind: _Watch() for kind in CostKind}
        self._lately = dict.fromkeys(CostKind, PredictedAndMeasured(0.0, 0.0))

    @property
    def model(self) -> CostModel:
        return self._model

    def ratio(self, kind: CostKind) -> float:
        """Return measured over predicted seconds, lately; 1.0 before anything was measured."""
        return exp(self._watches[kind].mean_log_ratio)

    def lately(self, kind: CostKind) -> PredictedAndMeasured:
        """Return the seconds of about the last thousand, the older the less."""
        return self._lately[kind]

    def observe(self, kind: CostKind, *, predicted_s: float, measured_s: float) -> bool:
        """True if the model was corrected because of it. `predicted_s` is the current model's word.

        Nothing is learnt where nothing was predicted, or nothing measured: a clock has a resolution.
        """
        if predicted_s <= 0 or measured_s <= 0:
            return False
        before = self._lately[kind]
        self._lately[kind] = PredictedAndMeasured(
            _FADING * before.predicted_s + predicted_s, _FADING * before.measured_s + measured_s
        )
        watch, config = self._watches[kind], self._config
        log_ratio = max(min(log(measured_s / predicted_s), log(_MAX_RATIO)), -log(_MAX_RATIO))
        watch.num_seen += 1
        # The first ratios are averaged, or a mean that starts from nothing would lag behind for long.
        weight = max(config.smoothing, 1 / watch.num_seen)
        watch.mean_log_ratio += weight * (log_ratio - watch.mean_log_ratio)
        is_beyond = abs(watch.mean_log_ratio) > log(config.bound)
        watch.num_beyond = watch.num_beyond + 1 if is_beyond else 0
        if watch.num_beyond < config.patience:
            return False
        self._correct(kind, exp(watch.mean_log_ratio))
        return True

    def _correct(self, kind: CostKind, ratio: float) -> None:
        corrections = self._model.corrections
        factor = max(min(corrections.of(kind) * ratio, _MAX_CORRECTION), 1 / _MAX_CORRECTION)
        self._model = replace(self._model, corrections=replace(corrections, **{kind.value: factor}))
        self._watches[kind] = _Watch()
