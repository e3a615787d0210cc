"""Structured output: how an answer must look, as one frozen record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from loraplex.core.errors import InvalidRequestError

MAX_CHARS: Final = 65_536
"""Most characters of a schema, expression, grammar or list of choices."""


class OutputKind(StrEnum):
    """Kinds of structure, named as in vLLM's `structured_outputs`."""

    JSON = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """`text`: a JSON schema, a regular expression, a JSON list of texts, or a grammar in the notation of Lark
    or GBNF; empty for `json_object`, which is any JSON object. `param`: the field of the request that asked
    for it, for error messages."""

    kind: OutputKind
    text: str = ""
    param: str = "structured_outputs"

    def __post_init__(self) -> None:
        if len(self.text) > MAX_CHARS:
            raise InvalidRequestError(
                f"{self.param} has {len(self.text):,} characters, more than the {MAX_CHARS:,} that a request "
                "may have; shorten it",
                param=self.param,
            )
