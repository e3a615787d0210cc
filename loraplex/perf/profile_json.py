"""Cost models as JSON files, read strictly: a misread figure would be wrong in every prediction.

    {"version": 5, "subject": {...}, "measured": true, "bus": {...} or null, "read": {...}, "disk": {...},
     "step": {...}, "assist": {...}, "held_out": {...} or null, "memory": {...} or null,
     "corrections": {...}, "kernels": "rank-proportional" or "padded", "merge": {...},
     "environment": {...}}

`environment` is for people: the time of the measurement, and versions of packages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from loraplex.core.errors import StorageError, UserError
from loraplex.core.modules import MODULES
from loraplex.core.whole_file import write_whole
from loraplex.perf.assist_cost import AssistCost
from loraplex.perf.assist_split import ROW_ALIGNMENT
from loraplex.perf.cost_model import Corrections, CostModel, KernelKind
from loraplex.perf.default_model import default_merge
from loraplex.perf.engine_memory import EngineMemory
from loraplex.perf.held_out import HeldOut
from loraplex.perf.layer_pipeline import Bus
from loraplex.perf.least_squares import FitQuality
from loraplex.perf.line import Line
from loraplex.perf.step_cost import RowCurve, StepCost, StepTerms
from loraplex.perf.subject import Subject

VERSION: Final = 5
_STEP_TOKENS: Final = 2048
_UNITS: Final = {
    "*_s": "seconds",
    "*_byte_s": "seconds a byte",
    "*_position_s, *_pair_s": "seconds a position",
    "unit_s": "seconds a byte",
    "weight_s, row_s": "seconds a weight, the latter for each row",
    "token_s": "seconds a token",
    "rows_each": "rows",
    "*_bytes": "bytes",
    "*_error": "shares of what was measured",
}
"""Units by suffix of a name; for readers of the file."""
_MAX_FILE_BYTES: Final = 1 << 20
_MOST: Final = 1e6
"""Upper bound of all costs: a step of eleven days is a mistake, and 1e300 s would stop a simulation's
clock."""


class ProfileError(UserError):
    """A profile that cannot be used as it is; the message names the file and what to run."""


def write_profile(path: Path, model: CostModel, environment: Mapping[str, Any] | None = None) -> None:
    """Replace the file atomically: readers see the old or the new profile. Raises StorageError."""
    text = profile_to_json(model, environment)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise StorageError(f"{path}: the profile cannot be written ({error.strerror})") from error


def read_profile(path: Path, subject: Subject | None = None) -> CostModel:
    """Read a profile. `subject`: the engine it must have been measured for. Raises ProfileError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {_MAX_FILE_BYTES:,} bytes, so it is no profile")
        model = profile_from_json(content.decode("utf-8"))
        if subject is not None and (differences := model.subject.differences(subject)):
            raise ValueError(f"it was measured for {', '.join(differences)}")
    except OSError as error:
        raise ProfileError(
            f"{path}: the profile cannot be read ({error.strerror}); run `loraplex profile` to make one"
        ) from error
    except ValueError as error:
        raise ProfileError(f"{path}: {error}; run `loraplex profile` again") from error
    return model


def profile_to_json(model: CostModel, environment: Mapping[str, Any] | None = None) -> str:
    """Return the text of a file; ValueError for a number that JSON does not have."""
    document = {
        "version": VERSION,
        **asdict(model),
        "units": _UNITS,
        "environment": dict(environment or {}),
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def profile_from_json(text: str) -> CostModel:
    """Invert `profile_to_json`. Raises ValueError that says where the text is wrong."""
    try:
        document = json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} in line {error.lineno}") from error
    except RecursionError:
        raise ValueError("nested too deeply to be a profile") from None
    top = JsonObject(document, "the profile")
    version = top.take("version")
    if isinstance(version, int) and 0 < version < VERSION:
        raise ValueError("it was made by an older loraplex")
    if version != VERSION:
        raise ValueError(f"its format is of version {version!r}, this loraplex reads version {VERSION}")
    subject, step = _subject(top.child("subject")), _step_cost(top.child("step"))
    model = CostModel(
        subject=subject,
        measured=top.flag("measured"),
        bus=None if (bus := top.optional("bus")) is None else _bus(bus),
        read=_line(top.child("read")),
        disk=_line(top.child("disk")),
        step=step,
        assist=_assist_cost(top.child("assist")),
        held_out=None if (held_out := top.optional("held_out")) is None else _held_out(held_out),
        memory=None if (memory := top.optional("memory")) is None else _memory(memory),
        corrections=_corrections(top.child("corrections")),
        # Older profiles lack `kernels`: they were measured on ours, which do not pad.
        kernels=_kernels(top) if "kernels" in top.names else KernelKind.RANK,
        # Nor was merging measured for them.
        merge=_line(top.child("merge")) if "merge" in top.names else default_merge(subject.device, step),
    )
    for name in ("environment", *(["units"] if "units" in top.names else [])):
        top.child(name)
    top.end()
    return model


class JsonObject:
    """A JSON object whose fields must all be taken, each once; `end` refuses the rest."""

    def __init__(self, value: object, place: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{place} is not an object")
        self._fields = dict(value)
        self.place = place

    @property
    def names(self) -> list[str]:
        """Names of the fields that were not taken yet."""
        return list(self._fields)

    def take(self, key: str) -> object:
        if key not in self._fields:
            raise ValueError(f"{self.place} has no {key!r}")
        return self._fields.pop(key)

    def child(self, key: str) -> JsonObject:
        return JsonObject(self.take(key), key)

    def optional(self, key: str) -> JsonObject | None:
        value = self.take(key)
        return None if value is None else JsonObject(value, key)

    def items(self, key: str) -> list[object]:
        value = self.take(key)
        if not isinstance(value, list) or not value:
            raise ValueError(f"{self.place}: {key} is not a list with something in it")
        return value

    def text(self, key: str) -> str:
        value = self.take(key)
        if not isinstance(value, str) or not value:
            raise ValueError(f"{self.place}: {key} is not a text")
        return value

    def flag(self, key: str) -> bool:
        value = self.take(key)
        if not isinstance(value, bool):
            raise ValueError(f"{self.place}: {key} is neither true nor false")
        return value

    def number(self, key: str) -> float:
        return _number(self.take(key), f"{self.place}: {key}")

    def count(self, key: str) -> int:
        return _count(self.take(key), f"{self.place}: {key}")

    def optional_count(self, key: str) -> int | None:
        value = self.take(key)
        return None if value is None else _count(value, f"{self.place}: {key}")

    def end(self) -> None:
        if self._fields:
            raise ValueError(f"{self.place} has an unknown {', '.join(map(repr, self._fields))}")


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _number(value: object, place: str, *, least: float = 0.0) -> float:
    # bool is an int in Python, and its JSON reader accepts NaN and Infinity as numbers.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{place} is {value!r}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not least <= number <= _MOST:
        raise ValueError(f"{place} is {number}, not a number of at least {least:g} and at most {_MOST:g}")
    return number


def _count(value: object, place: str, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{place} is {value!r}, not a whole number of at least {least}")
    return value


def _quality(parent: JsonObject) -> FitQuality | None:
    found = parent.optional("quality")
    return None if found is None else _quality_fields(found, parent.place)


def _quality_fields(found: JsonObject, place: str) -> FitQuality:
    quality = FitQuality(
        num_samples=found.count("num_samples"),
        # May be negative: a bad fit explains less than the mean would.
        r_squared=_number(found.take("r_squared"), f"{place}: r_squared", least=-math.inf),
        mean_error=_number(found.take("mean_error"), f"{place}: mean_error"),
        worst_error=_number(found.take("worst_error"), f"{place}: worst_error"),
    )
    found.end()
    return quality


def _held_out(found: JsonObject) -> HeldOut:
    names, serving = ("decode", "prefill", "load"), found.optional("serving")
    held_out = HeldOut(
        **{name: _quality_fields(found.child(name), f"held_out: {name}") for name in names},
        serving=None if serving is None else _quality_fields(serving, "held_out: serving"),
    )
    found.end()
    return held_out


def _memory(found: JsonObject) -> EngineMemory:
    arena_bytes, kv_tokens = (found.optional_count(name) for name in ("arena_bytes", "kv_tokens"))
    if (arena_bytes is None) == (kv_tokens is None):
        raise ValueError("memory: one of arena_bytes and kv_tokens is a number, the other null")
    ranks = found.child("rank_bytes")
    memory = EngineMemory(
        max_context=found.count("max_context"),
        token_bytes=found.count("token_bytes"),
        block_tokens=found.count("block_tokens"),
        arena_bytes=arena_bytes,
        kv_tokens=kv_tokens,
        host_bytes=found.count("host_bytes"),
        table_bytes=_count(found.take("table_bytes"), "memory: table_bytes", least=0),
        rank_bytes={module: ranks.count(module) for module in MODULES},
        # Older profiles lack a step's limits.
        step_tokens=found.count("step_tokens") if "step_tokens" in found.names else _STEP_TOKENS,
        position_cost=found.number("position_cost") if "position_cost" in found.names else 0.0,
    )
    for each in (ranks, found):
        each.end()
    return memory


def _subject(found: JsonObject) -> Subject:
    subject = Subject(
        machine=found.text("machine"),
        device=found.text("device"),
        model=found.text("model"),
        dtype=found.text("dtype"),
        num_layers=found.count("num_layers"),
    )
    found.end()
    return subject


def _line(found: JsonObject) -> Line:
    line = Line(latency_s=found.number("latency_s"), unit_s=found.number("unit_s"), quality=_quality(found))
    found.end()
    return line


def _bus(found: JsonObject) -> Bus:
    bus = Bus(copy=_line(found.child("copy")), launch_s=found.number("launch_s"))
    found.end()
    return bus


def _step_cost(found: JsonObject) -> StepCost:
    terms = found.child("terms")
    cost = StepCost(
        decodes=_curve(found.child("decodes")),
        prompts=_curve(found.child("prompts")),
        terms=StepTerms(**{field.name: terms.number(field.name) for field in fields(StepTerms)}),
        quality=_quality(found),
    )
    for each in (terms, found):
        each.end()
    return cost


def _curve(found: JsonObject) -> RowCurve:
    place = found.place
    rows = tuple(_count(value, f"{place}: rows") for value in found.items("rows"))
    seconds_at = tuple(_number(value, f"{place}: seconds_at") for value in found.items("seconds_at"))
    if len(rows) != len(seconds_at):
        raise ValueError(f"{place}: there are not as many seconds_at as rows")
    if list(rows) != sorted(set(rows)) or list(seconds_at) != sorted(seconds_at):
        raise ValueError(f"{place}: rows and seconds_at are not in rising order")
    curve = RowCurve(rows=rows, seconds_at=seconds_at, stepped=found.flag("stepped"))
    found.end()
    return curve


def _assist_cost(found: JsonObject) -> AssistCost:
    names = ("round_trip_s", "token_s", "call_s", "weight_s", "row_s")
    # Older profiles lack `rows_each`: their costs were fitted to tasks split as finely as can be.
    rows_each = found.count("rows_each") if "rows_each" in found.names else ROW_ALIGNMENT
    costs = {name: found.number(name) for name in names}
    cost = AssistCost(**costs, rows_each=rows_each, quality=_quality(found))
    found.end()
    return cost


def _corrections(found: JsonObject) -> Corrections:
    factors = {field.name: found.number(field.name) for field in fields(Corrections)}
    if min(factors.values()) <= 0:
        raise ValueError("corrections: a factor is zero")
    found.end()
    return Corrections(**factors)


def _kernels(top: JsonObject) -> KernelKind:
    kind = top.text("kernels")
    if kind not in set(KernelKind):
        raise ValueError(f"kernels is {kind!r}, not one of {', '.join(KernelKind)}")
    return KernelKind(kind)
