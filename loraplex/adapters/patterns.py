"""Matching regular expressions from an adapter's config against module names within a time limit.

A config is untrusted data, and Python's `re` can take years on a 40-character key. It also holds the
interpreter lock meanwhile, so a thread with a timeout does not help. Small tables of patterns without
quantifiers and alternatives are fast and run here; all others run in a short-lived process that can be
killed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from loraplex.adapters import pattern_worker
from loraplex.core.errors import AdapterFormatError

MATCH_TIME_LIMIT_S: Final = 5.0

_MAX_MATCHES_HERE: Final = 1_000_000
_LINEAR = re.compile(r"[\w.\-^$\\]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """A regex around `source`, the text of the config field it was made from.

    `full`: it has to match the whole key. If it has a group named `idx`, a match yields the text of that
    group.
    """

    field: str
    source: str
    regex: str
    full: bool = False


def match_table(
    patterns: Sequence[Pattern], keys: Sequence[str], *, time_limit_s: float = MATCH_TIME_LIMIT_S
) -> list[list[str | None]]:
    """Return table[pattern][key]: None without a match, else the text of the group `idx` (or "").

    Raises AdapterFormatError, naming the field, for a pattern that is not a regex or takes too long.
    """
    jobs = [(pattern.regex, pattern.full) for pattern in patterns]
    is_small = len(patterns) * len(keys) <= _MAX_MATCHES_HERE
    if is_small and all(_LINEAR.fullmatch(pattern.source) for pattern in patterns):
        try:
            return pattern_worker.match_all(jobs, keys)
        except pattern_worker.BadPatternError as exc:
            raise _not_a_regex(patterns[exc.index], str(exc)) from exc
    return _match_in_process(patterns, jobs, keys, time_limit_s)


def _match_in_process(
    patterns: Sequence[Pattern], jobs: list[tuple[str, bool]], keys: Sequence[str], time_limit_s: float
) -> list[list[str | None]]:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", pattern_worker.__file__],
            input=json.dumps({"patterns": jobs, "keys": list(keys)}),
            capture_output=True,
            encoding="utf-8",
            timeout=time_limit_s,
            check=True,
        )
    except subprocess.TimeoutExpired as exc:
        fields = sorted({pattern.field for pattern in patterns})
        raise AdapterFormatError(
            f"{' / '.join(fields)}: the regular expressions take more than {time_limit_s:g} s to match the "
            "module names; write them without nested repetition, or list the module names",
            field=fields[0],
        ) from exc
    except (OSError, subprocess.CalledProcessError) as exc:
        raise AdapterFormatError(
            f"{patterns[0].field}: the regular expressions could not be matched ({exc}); "
            "list the module names instead",
            field=patterns[0].field,
        ) from exc
    answer = json.loads(done.stdout)
    if "failed" in answer:
        index, reason = answer["failed"]
        raise _not_a_regex(patterns[index], reason)
    table: list[list[str | None]] = answer["table"]
    return table


def _not_a_regex(pattern: Pattern, reason: str) -> AdapterFormatError:
    return AdapterFormatError(
        f"{pattern.field}: {pattern.source[:200]!r} is not a valid regular expression ({reason})",
        field=pattern.field,
    )
