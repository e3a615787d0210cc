"""Decide when requests migrate, and between which replicas: dLoRA's selective migration.

It looks at one number per replica and criterion, never at single requests, and costs one sort of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from loraplex.core.arrays import BoolArray, FloatArray
from loraplex.core.errors import UserError

# The constants of dLoRA's artifact (engine_manager.py). Migration is considered every ten seconds.
PERIOD_S: Final = 10.0
# A replica is short of memory when this share of its KV blocks is in use.
KV_SHARE: Final = 0.9
# Or it is overloaded when it has this many requests more than the mean of all replicas.
REQUESTS_ABOVE_MEAN: Final = 16.0
# The busiest replica is paired with the least busy one; this is K in the paper.
NUM_PAIRS: Final = 1

Column = Sequence[float] | FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class UnevenReplicas:
    """The replicas that take part in a migration: the most overloaded first, the least loaded first."""

    overloaded: tuple[int, ...]
    underloaded: tuple[int, ...]


def uneven_replicas(
    *,
    kv_share: Column,
    num_requests: Column,
    accepts: Sequence[bool] | BoolArray | None = None,
    num_pairs: int = NUM_PAIRS,
) -> UnevenReplicas | None:
    """Return the replicas that take part, or None if the load is even enough. Columns have one value per
    replica.

    `accepts`: False for replicas that must not be sent requests; None if there are none of these.
    `num_pairs`: at most this many overloaded and this many underloaded replicas take part.

    Memory is checked first, then requests. A replica that reaches a threshold is overloaded; one that is
    below the KV threshold, or has fewer requests than the mean, is underloaded. Ties are broken by number.
    Replicas that must not be sent requests and have none, because they are down, do not count for the mean.
    """
    shares, requests = _checked("KV shares", kv_share), _checked("numbers of requests", num_requests)
    if len(shares) != len(requests):
        raise UserError(f"there are KV shares of {len(shares)} replicas and requests of {len(requests)}")
    takes = np.ones(len(shares), np.bool_) if accepts is None else np.asarray(accepts, np.bool_)
    found = _matched(shares, shares >= KV_SHARE, takes & (shares < KV_SHARE), num_pairs)
    if found is not None:
        return found
    counted = requests[takes | (requests > 0)]
    mean = float(counted.mean()) if len(counted) else 0.0
    return _matched(requests, requests - mean >= REQUESTS_ABOVE_MEAN, takes & (requests < mean), num_pairs)


def _matched(
    load: FloatArray, overloaded: BoolArray, underloaded: BoolArray, num_pairs: int
) -> UnevenReplicas | None:
    if not overloaded.any() or not underloaded.any():
        return None
    most, least = np.argsort(-load, kind="stable"), np.argsort(load, kind="stable")
    return UnevenReplicas(
        overloaded=tuple(most[overloaded[most]][:num_pairs].tolist()),
        underloaded=tuple(least[underloaded[least]][:num_pairs].tolist()),
    )


def _checked(what: str, column: Column) -> FloatArray:
    values = np.asarray(column, np.float64)
    if not len(values):
        raise UserError("a fleet of no replicas has no load")
    for replica in np.flatnonzero(~(values >= 0) | np.isinf(values))[:1].tolist():
        value = float(values[replica])
        raise UserError(
            f"among the {what} is {value if math.isnan(value) else f'{value:g}'}, of replica {replica}"
        )
    return values
