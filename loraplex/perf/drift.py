"""Compares predicted with measured costs while serving, and corrects the model where they differ lastingly.

Machines change under a profile: another program takes memory bandwidth, a device lowers its clocks. The
watched value is the logarithm of measured over predicted, so that twice and half count alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log
from typing import Final, NamedTuple

from loraplex.perf.cost_model import CostKind, CostModel

_MAX_RATIO: Final = 4.0
"""Bound of a single ratio, so that one pause, of a garbage collector or of the machine, counts for little."""
_MAX_CORRECTION: Final = 1000.0
_FADING: Final = 0.999


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftConfig:
    """Options of the watch. `smoothing`: the weight of the newest ratio in the running mean. `bound`:
    predictions within this factor are good enough. `patience`: how many times in a row the mean must exceed
    it."""

    smoothing: float = 0.1
    bound: float = 1.3
    patience: int = 20

    def __post_init__(self) -> None:
        assert 0 < self.smoothing <= 1
        assert self.bound > 1
        assert self.patience >= 1


class PredictedAndMeasured(NamedTuple):
    """Predicted and measured seconds of the same steps or copies."""

    predicted_s: float
    measured_s: float


@dataclass(slots=True)
class _Watch:
    """Observations of one cost since it was last corrected."""

    mean_log_ratio: float = 0.0
    num_seen: int = 0
    num_beyond: int = 0


class DriftWatch:
    """Owns the current model; callers must read `model` for each prediction."""

    def __init__(self, model: CostModel, config: DriftConfig | None = None) -> None:
        self._config = config or DriftConfig()
        self._model = model
        self._watches = {kind: _Watch() for kind in CostKind}
        self._lately = dict.fromkeys(CostKind, PredictedAndMeasured(0.0, 0.0))

    @property
    def model(self) -> CostModel:
        return self._model

    def ratio(self, kind: CostKind) -> float:
        """Return the running mean of measured over predicted seconds; 1.0 before anything was measured."""
        return exp(self._watches[kind].mean_log_ratio)

    def lately(self, kind: CostKind) -> PredictedAndMeasured:
        """Return the seconds of about the last thousand observations, older ones weighted less."""
        return self._lately[kind]

    def observe(self, kind: CostKind, *, predicted_s: float, measured_s: float) -> bool:
        """Record a measurement beside the current model's prediction; return whether the model was corrected.

        Values of zero are ignored: nothing was predicted, or it was below the clock's resolution.
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
        # The first ratios are averaged, as a running mean that starts from zero would lag behind for long.
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
