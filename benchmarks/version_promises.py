"""Checks that a server answered with a version that it promised.

Every change of a name is bounded by the call that requested it: before the call began the name stood for the
old version, after it ended for the new one, and in between for either. A server chooses the version of a
request between its sending and the headers of its answer, so the version must be one that the name stood for
at some moment in between. If there is a canary, the request's key decides which of the two it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.version_checkpoint import Answers, VersionCheckpoint
from loraplex.adapters.rollout import takes_canary
from loraplex.server.request_log import short_version

NOT_SERVED: Final = "404 model_not_found"
_MAX_EXAMPLES: Final = 20


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The version and canary that a name stands for. `version`: None if it is not served. `canary`: on trial
    for `share` of the requests."""

    name: str
    version: str | None = None
    canary: str | None = None
    share: float = 0.0

    def version_for(self, key: str) -> str | None:
        if self.canary is not None and takes_canary(self.name, self.canary, self.share, key):
            return self.canary
        return self.version


@dataclass(kw_only=True)
class _Span:
    """The longest interval in which a name can have had a standing."""

    standing: Standing
    since_s: float
    until_s: float = math.inf


class Promises:
    """The standings of each name over time. Query it after the last change: a change counts once it is
    done."""

    def __init__(self) -> None:
        self._spans: dict[str, list[_Span]] = {}

    def now(self, name: str) -> Standing:
        return self._of(name)[-1].standing

    def changed(self, after: Standing, *, began_s: float, ended_s: float) -> None:
        """Record a change that took effect at some time between the beginning and the end of its call."""
        spans = self._of(after.name)
        spans[-1].until_s = ended_s
        spans.append(_Span(standing=after, since_s=began_s))

    def between(self, name: str, since_s: float, until_s: float) -> list[Standing]:
        """Return everything that a name can have stood for within this interval."""
        found = self._of(name)
        return [each.standing for each in found if each.since_s <= until_s and each.until_s >= since_s]

    def _of(self, name: str) -> list[_Span]:
        return self._spans.setdefault(name, [_Span(standing=Standing(name=name), since_s=-math.inf)])


@dataclass(kw_only=True, slots=True)
class Answer:
    """A request and its answer. `name`: of the adapter; None for the base model. `key`: decides whether a
    canary answers it. `headers_s`: when the answer's headers arrived. `header` and `usage`: the versions in
    them. `error`: status and code of the error that ended it."""

    request_id: str
    name: str | None
    key: str
    prompt: int
    num_tokens: int
    is_stream: bool
    sent_s: float
    headers_s: float = math.inf
    header: str | None = None
    usage: str | None = None
    token_ids: list[int] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A server's list of adapters within an interval: version and canary by name."""

    since_s: float
    until_s: float
    found: Mapping[str, tuple[str, str | None]]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A requested change of a name. `version`: the new version that its audit line must have, if any."""

    request_id: str
    verb: str
    version: str | None
    is_done: bool


@dataclass(kw_only=True)
class Judge:
    """Compares answers, lists and log lines with promises, and tokens with their references.

    `overwritten`: names whose versions share one folder, so that the files of a version that is still served
    may be gone; their errors are counted separately. `wrong` counts violations; `examples` has the first
    ones."""

    promises: Promises
    served: VersionCheckpoint
    overwritten: Collection[str] = ()
    ends: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    errors_overwritten: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)
    num_on_trial: int = 0
    num_by_canary: int = 0
    sum_of_shares: float = 0.0

    def __post_init__(self) -> None:
        self._answers: dict[str | None, Answers] = {None: self.served.base_answers}
        for versions in self.served.versions.values():
            self._answers |= {each.version: each.answers for each in versions}

    def judge(self, answer: Answer) -> None:
        """Count an answer and its violations."""
        self.ends["requests"] += 1
        standings = [] if answer.name is None else self._standings(answer)
        promised = {each.version_for(answer.key) for each in standings} or {None}
        if answer.error == NOT_SERVED:
            self.ends["not served"] += 1
            if answer.name is None or None not in promised:
                self._count("refused though served", answer)
            return
        if answer.error is not None:
            errors = self.errors_overwritten if answer.name in self.overwritten else self.errors
            errors[answer.error] += 1
        else:
            self.ends["answers"] += 1
            self.ends["streams"] += answer.is_stream
            self._judge_canary(answer, standings)
        if answer.error is None or answer.token_ids:
            self._judge_versions(answer, promised)
            self._judge_tokens(answer)

    def _standings(self, answer: Answer) -> list[Standing]:
        assert answer.name is not None
        return self.promises.between(answer.name, answer.sent_s, answer.headers_s)

    def _judge_versions(self, answer: Answer, promised: set[str | None]) -> None:
        is_base = answer.name is None
        # An adapter that is not served must not be answered at all, not even by the base model.
        if answer.header not in promised or (answer.header is None and not is_base):
            self._count("another version than promised", answer)
        if answer.error is None and answer.usage != answer.header:
            self._count("header and usage differ", answer)

    def _judge_tokens(self, answer: Answer) -> None:
        """Check that tokens are those of the version in the header; for an answer that was cut short, their
        beginning."""
        expected = self._answers.get(answer.header, ((),) * len(self.served.prompts))[answer.prompt]
        num_tokens = answer.num_tokens if answer.error is None else len(answer.token_ids)
        if tuple(answer.token_ids) == expected[:num_tokens]:
            return
        others = [each[answer.prompt] for each in self._answers.values()]
        is_another = any(tuple(answer.token_ids) == each[:num_tokens] for each in others)
        self._count("tokens of another version" if is_another else "tokens of no version", answer)

    def _judge_canary(self, answer: Answer, standings: Sequence[Standing]) -> None:
        """Count the answers of canaries, if nothing changed meanwhile."""
        if len(standings) == 1 and standings[0].canary is not None:
            self.num_on_trial += 1
            self.num_by_canary += answer.header == standings[0].canary
            self.sum_of_shares += standings[0].share

    def judge_listing(self, listing: Listing) -> None:
        self.ends["lists"] += 1
        for name in self.served.versions:
            standings = self.promises.between(name, listing.since_s, listing.until_s)
            found = listing.found.get(name, (None, None))
            if found not in [(each.version, each.canary) for each in standings]:
                self._count("lists unlike what was promised", {"name": name, "found": found})

    def judge_log(
        self, lines: Iterable[Mapping[str, Any]], answers: Sequence[Answer], changes: Sequence[Change]
    ) -> None:
        """Compare the log's lines about requests and changes with what clients saw."""
        requests: dict[str, str | None] = {}
        audits: dict[str, Mapping[str, Any]] = {}
        for line in lines:
            if line.get("logger") == "loraplex.request":
                requests[line["request_id"]] = line.get("version")
            elif line.get("logger") == "loraplex.audit" and "adapter stage" not in line["message"]:
                audits[line["request_id"]] = line
        for answer in answers:
            if answer.error is None:
                expected = short_version(answer.header)
                if requests.get(answer.request_id, "no line") != expected:
                    self._count("request lines that differ", answer)
        for change in changes:
            audit = audits.get(change.request_id, {})
            is_same = change.version is None or audit.get("new_version") == short_version(change.version)
            if (audit.get("result") == "done") is not change.is_done or (change.is_done and not is_same):
                shown = {key: audit.get(key) for key in ("message", "adapter", "result", "new_version")}
                self._count("audit lines that differ", {"change": change.verb, **shown})
        self.ends["request lines"] = len(requests)
        self.ends["audit lines"] = len(audits)

    def _count(self, what: str, about: Answer | Mapping[str, Any]) -> None:
        self.wrong[what] += 1
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.append({"what": what, **(_shown(about) if isinstance(about, Answer) else about)})

    def summary(self) -> dict[str, Any]:
        on_trial = self.num_on_trial
        return {
            **{what: self.ends[what] for what in ("requests", "answers", "streams", "not served")},
            "errors": dict(self.errors.most_common()),
            "errors_overwritten": dict(self.errors_overwritten.most_common()),
            "compared": {what: self.ends[what] for what in ("lists", "request lines", "audit lines")},
            "wrong": {what: self.wrong[what] for what in WRONG},
            "examples": self.examples,
            "canaries": {
                "requests": on_trial,
                "share": round(self.num_by_canary / on_trial, 4) if on_trial else None,
                "share_asked": round(self.sum_of_shares / on_trial, 4) if on_trial else None,
            },
        }


WRONG: Final = (
    "another version than promised",
    "tokens of another version",
    "tokens of no version",
    "refused though served",
    "header and usage differ",
    "request lines that differ",
    "audit lines that differ",
    "lists unlike what was promised",
)


def _shown(answer: Answer) -> dict[str, Any]:
    return {
        "request": answer.request_id,
        "name": answer.name,
        "versions": [short_version(each) for each in (answer.header, answer.usage)],
        "prompt": answer.prompt,
        "stream": answer.is_stream,
        "tokens": answer.token_ids,
        "error": answer.error,
    }
