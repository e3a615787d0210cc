"""When requests migrate, and between which replicas: dLoRA's selective migration.

It looks at one number per replica and kind, never at requests, and costs one sort of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import UserError

# The constants of dLoRA's artifact (engine_manager.py). Migration is considered every ten seconds.
PERIOD_S = 10.0
# A replica is short of memory when this share of its KV blocks is in use.
KV_SHARE = 0.9
# Or it is overloaded when it has this many requests more than the mean of all replicas.
REQUESTS_ABOVE_MEAN = 16.0
# The busiest replica is matched with the least busy one; in the paper that is K.
NUM_PAIRS = 1

Floats = npt.NDArray[np.float64]
Column = Sequence[float] | Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class TriggerConfig:
    """Thresholds. The paper also names a queueing delay, without a value: None leaves it out.

    `num_pairs`: at most so many overloaded and so many underloaded replicas enter.
    """

    kv_share: float = KV_SHARE
    requests_above_mean: float = REQUESTS_ABOVE_MEAN
    queueing_s_above_mean: float | None = None
    num_pairs: int = NUM_PAIRS

    def __post_init__(self) -> None:
        if not 0 < self.kv_share <= 1:
            raise UserError(
                f"a KV share of {self.kv_share:g} triggers no migration; choose one above 0, up to 1"
            )
        if not self.requests_above_mean > 0:
            raise UserError(
                f"{self.requests_above_mean:g} requests above the mean: the number must be above 0"
            )
        if self.queueing_s_above_mean is not None and not self.queueing_s_above_mean > 0:
            raise UserError(
                f"{self.queueing_s_above_mean:g} s of queueing above the mean: it must be above 0"
            )
        if self.num_pairs < 1:
            raise UserError(f"{self.num_pairs} pairs of replicas: one at least must enter a migration")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrants:
    """The replicas that enter a migration: the most overloaded first, the least loaded first."""

    overloaded: tuple[int, ...]
    underloaded: tuple[int, ...]


def entrants_of(
    config: TriggerConfig,
    *,
    kv_share: Column,
    num_requests: Column,
    queueing_s: Column | None = None,
    accepts: Sequence[bool] | npt.NDArray[np.bool_] | None = None,
) -> Entrants | None:
    """Return which replicas enter, or None if the load is even enough. Columns have one value per replica.

    `accepts`: False for replicas that must not be sent requests; None if there are none of these.

    Memory is looked at first, then requests, then queueing. A replica that reaches a threshold is overloaded;
    one that is below the KV threshold, or below the mean of the other two, is underloaded. Of equal ones the
    first enters.
    """
    shares, requests = _checked("KV shares", kv_share), _checked("numbers of requests", num_requests)
    if len(shares) != len(requests):
        raise UserError(f"there are KV shares of {len(shares)} replicas and requests of {len(requests)}")
    takes = np.ones(len(shares), np.bool_) if accepts is None else np.asarray(accepts, np.bool_)
    found = _matched(shares, shares >= config.kv_share, takes & (shares < config.kv_share), config.num_pairs)
    if found is None:
        found = _above_mean(requests, config.requests_above_mean, takes, config.num_pairs)
    if found is None and config.queueing_s_above_mean is not None:
        if queueing_s is None or len(queueing_s) != len(shares):
            raise UserError("a threshold of queueing needs the queueing delay of each replica")
        delays = _checked("queueing delays", queueing_s)
        found = _above_mean(delays, config.queueing_s_above_mean, takes, config.num_pairs)
    return found


def _above_mean(
    load: Floats, threshold: float, takes: npt.NDArray[np.bool_], num_pairs: int
) -> Entrants | None:
    mean = float(load.mean())
    return _matched(load, load - mean >= threshold, takes & (load < mean), num_pairs)


def _matched(
    load: Floats, overloaded: npt.NDArray[np.bool_], underloaded: npt.NDArray[np.bool_], num_pairs: int
) -> Entrants | None:
    if not overloaded.any() or not underloaded.any():
        return None
    most, least = np.argsort(-load, kind="stable"), np.argsort(load, kind="stable")
    return Entrants(
        overloaded=tuple(most[overloaded[most]][:num_pairs].tolist()),
        underloaded=tuple(least[underloaded[least]][:num_pairs].tolist()),
    )


def _checked(what: str, column: Column) -> Floats:
    values = np.asarray(column, np.float64)
    if not len(values):
        raise UserError("a fleet of no replicas has no load")
    for replica in np.flatnonzero(~(values >= 0) | np.isinf(values))[:1].tolist():
        value = float(values[replica])
        raise UserError(
            f"among the {what} is {value if math.isnan(value) else f'{value:g}'}, of replica {replica}"
        )
    return values
