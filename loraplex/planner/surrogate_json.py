"""Surrogates as JSON files, read strictly: a misread threshold would be wrong in every plan.

    {"version": 3, "kind": "planner surrogate", "trained_on": {...},
     "ranges": {"served_adapters": [8.0, 384.0], ...}, "units": {...},
     "in_logarithms": true, "throughput": {"num_trees": 300, "num_nodes": 9172, "nodes": BASE64},
     "starvation": {...} or null, "accuracy": {...}, "environment": {...}}

`nodes` are the arrays of a `Forest` behind one another, little-endian and compressed: a large forest takes
megabytes so, and tens of them in digits. `environment`: date and versions, for people.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from loraplex.core.errors import StorageError
from loraplex.core.whole_file import write_whole
from loraplex.perf.profile_json import JsonObject, unique_keys
from loraplex.perf.slot_profile import SlotProfile
from loraplex.planner.demand import PlanError
from loraplex.planner.features import FEATURE_NAMES, FEATURE_UNITS, PAPER_FEATURES
from loraplex.planner.surrogate import Surrogate, check_profile
from loraplex.planner.trained_on import TrainedOn
from loraplex.planner.trees import LEAF, Forest
from loraplex.twin.slot_state import Floats

VERSION: Final = 3
KIND: Final = "planner surrogate"
_ADVICE: Final = "train it again with `loraplex plan train`"
_MAX_FILE_BYTES: Final = 1 << 30
_MAX_NODES: Final = 100_000_000
_DTYPES: Final = {"roots": "<i8", "feature": "<i1", "number": "<f8", "right": "<i4"}
_UNITS: Final = {
    "throughput": "prompt and answer tokens per second served, if so many are offered, or their logarithm",
    "starvation": "share of votes for less than 0.9 of the offered tokens being served; null: by throughput",
    "trained_on": "tokens of a request, and seconds of a run",
}


class SurrogateError(PlanError):
    """A surrogate's file cannot be used; the message names it, and says what to do."""


def surrogate_to_json(surrogate: Surrogate, environment: Mapping[str, Any] | None = None) -> str:
    names = FEATURE_NAMES
    document = {
        "version": VERSION,
        "kind": KIND,
        "trained_on": surrogate.trained_on.as_json(),
        "ranges": dict(zip(PAPER_FEATURES, surrogate.ranges.tolist(), strict=True)),
        "units": {**{name: FEATURE_UNITS[name] for name in names}, **_UNITS},
        "in_logarithms": surrogate.in_logarithms,
        "throughput": _forest_to_json(surrogate.throughput),
        "starvation": None if surrogate.starvation is None else _forest_to_json(surrogate.starvation),
        "accuracy": dict(surrogate.accuracy),
        "environment": dict(environment or {}),
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def write_surrogate(path: Path, surrogate: Surrogate, environment: Mapping[str, Any] | None = None) -> None:
    """Replace the file atomically. `environment`: date and versions."""
    try:
        write_whole(path, surrogate_to_json(surrogate, environment))
    except OSError as error:
        raise StorageError(f"{path}: the surrogate cannot be written ({error.strerror})") from error


def read_surrogate(path: Path, profile: SlotProfile | None = None) -> Surrogate:
    """Read a surrogate. `profile`: what it must have been trained on. Raises SurrogateError, or PlanError if
    it is of another profile."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {_MAX_FILE_BYTES:,} bytes, so it is no surrogate")
        surrogate = surrogate_from_json(content.decode("utf-8"))
    except OSError as error:
        raise SurrogateError(
            f"{path}: the surrogate cannot be read ({error.strerror}); make one with `loraplex plan train`"
        ) from error
    except ValueError as error:
        raise SurrogateError(f"{path}: {error}; {_ADVICE}") from error
    if profile is not None:
        check_profile(surrogate, profile)
    return surrogate


def surrogate_from_json(text: str) -> Surrogate:
    """Invert `surrogate_to_json`. Raises ValueError that says where the text is wrong."""
    try:
        document = json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON, or not all of it: {error.msg} in line {error.lineno}") from error
    except RecursionError:
        raise ValueError("nested too deeply to be a surrogate") from None
    top = JsonObject(document, "the surrogate")
    if (kind := top.take("kind")) != KIND:
        raise ValueError(f"it is of kind {kind!r}, not {KIND!r}")
    if (version := top.take("version")) != VERSION:
        raise ValueError(f"its format is of version {version!r}, this loraplex reads version {VERSION}")
    names = FEATURE_NAMES
    accuracy = top.child("accuracy")
    starvation = top.optional("starvation")
    surrogate = Surrogate(
        trained_on=TrainedOn.of_json(top.take("trained_on")),
        ranges=_ranges(top.child("ranges"), PAPER_FEATURES),
        throughput=_forest(top.child("throughput"), len(names)),
        starvation=None if starvation is None else _forest(starvation, len(names)),
        in_logarithms=top.flag("in_logarithms"),
        accuracy={name: accuracy.number(name) for name in accuracy.names},
    )
    for name in ("units", "environment"):
        top.child(name)
    top.end()
    return surrogate


def _ranges(found: JsonObject, names: tuple[str, ...]) -> Floats:
    rows = []
    for name in names:
        row = found.items(name)
        if len(row) != 2 or not all(type(each) in (int, float) for each in row):
            raise ValueError(f"ranges: {name} is not a least and a greatest number")
        rows.append(row)
    found.end()
    ranges = np.array(rows, np.float64)
    if not (np.isfinite(ranges).all() and (ranges[:, 0] <= ranges[:, 1]).all()):
        raise ValueError("ranges: a number is not finite, or a least one above the greatest")
    return ranges


def _forest_to_json(forest: Forest) -> dict[str, Any]:
    arrays = (getattr(forest, name).astype(dtype) for name, dtype in _DTYPES.items())
    packed = zlib.compress(b"".join(each.tobytes() for each in arrays), 9)
    return {
        "num_trees": len(forest.roots),
        "num_nodes": len(forest.feature),
        "nodes": base64.b64encode(packed).decode(),
    }


def _forest(found: JsonObject, num_features: int) -> Forest:
    place, num_trees, num_nodes = found.place, found.count("num_trees"), found.count("num_nodes")
    if not num_trees <= num_nodes <= _MAX_NODES:
        raise ValueError(f"{place}: {num_trees} trees of {num_nodes} nodes cannot be")
    counts = {name: num_trees if name == "roots" else num_nodes for name in _DTYPES}
    num_bytes = sum(np.dtype(dtype).itemsize * counts[name] for name, dtype in _DTYPES.items())
    try:
        packed = base64.b64decode(found.text("nodes"), validate=True)
        unpacked = zlib.decompressobj().decompress(packed, num_bytes + 1)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"{place}: the nodes cannot be unpacked ({error})") from error
    found.end()
    if len(unpacked) != num_bytes:
        raise ValueError(f"{place}: there are fewer or more nodes than {num_nodes}")
    arrays, at = {}, 0
    for name, dtype in _DTYPES.items():
        native = np.dtype(dtype).newbyteorder("=")
        arrays[name] = np.frombuffer(unpacked, dtype, counts[name], at).astype(native)
        at += np.dtype(dtype).itemsize * counts[name]
    forest = Forest(**arrays)
    _check(forest, place, num_features)
    return forest


def _check(forest: Forest, place: str, num_features: int) -> None:
    """Raise ValueError for nodes that compiled code could not follow to a leaf, or to a number."""
    if not np.isfinite(forest.number).all():
        raise ValueError(f"{place}: a threshold or value is {math.nan} or infinite")
    num_nodes, index = len(forest.feature), np.arange(len(forest.feature))
    is_inner = forest.feature >= 0
    goes_on = (forest.right > index + 1) & (forest.right < num_nodes)
    roots_ok = forest.roots[0] == 0 and (np.diff(forest.roots) > 0).all() and forest.roots[-1] < num_nodes
    features_ok = (forest.feature >= LEAF).all() and (forest.feature < num_features).all()
    if not (roots_ok and features_ok and goes_on[is_inner].all()):
        raise ValueError(f"{place}: the nodes are no trees")
