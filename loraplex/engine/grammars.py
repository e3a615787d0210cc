"""Structured output: compiles what an answer must look like, and says which tokens it may go on with.

llguidance does the work. Compiling is cached, and takes from well under a millisecond to a tenth of a
second; the first compilation of a process also reads the tokenizer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import InvalidRequestError, ModelError
from loraplex.core.request import EngineRequest
from loraplex.core.structured_output import OutputKind, StructuredOutput
from loraplex.core.tenants import NO_TENANT
from loraplex.engine.schema_rules import (
    JSON_WHITESPACE,
    ascii_classes,
    closed_schema,
    ends_in_escape,
    refuse_large_multiples,
    refuse_many_repetitions,
)
from loraplex.engine.tenant_cache import TenantCache

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from loraplex.model.config import ModelConfig

logger = logging.getLogger(__name__)

_TOKENIZER_FILE: Final = "tokenizer.json"
_ANY_OBJECT: Final = '{"type": "object"}'
_CACHED_GRAMMARS: Final = 64
_SILENT: Final = 0
_PROBED_TOKENS: Final = 2
"""Tokens for which masks are computed beside the steps, before an answer begins: limits that a grammar
exceeds show there."""
_FIRST_FUEL: Final = 250_000
_STEP_FUEL: Final = 50_000
_MOST_STATES: Final = 100_000
"""Work of llguidance's lexer that a grammar may cause in all, and for one token. All requests of a step wait
for the latter: less than a tenth of a second, and a millisecond for most schemas."""
_NAMES: Final = {
    OutputKind.JSON: "JSON schema",
    OutputKind.JSON_OBJECT: "JSON schema",
    OutputKind.REGEX: "regular expression",
    OutputKind.CHOICE: "list of choices",
    OutputKind.GRAMMAR: "grammar",
}


_TOO_LARGE: Final = {
    "is nested too deeply; use fewer levels": (
        "recursion limit exceeded",
        "recursion depth exceeded",
        "too deeply nested",
        "maximum number of nested",
        "stack level exceeded",
    ),
    "has too many rules, alternatives or optional properties; use fewer, or make properties required": (
        "Parser Error: Current row has",
        "too big (limit",
        "schema too large",
        "DNF too large",
    ),
    "takes too much work; make repetitions and lengths smaller": (
        "lexer error",
        "lexer precomputation failed",
        "parser error",
        "fuel exhausted",
    ),
}
"""Faults of size in our words, with the fix, by what llguidance says of them."""


def check_structured_output(wanted: StructuredOutput) -> None:
    """Raise InvalidRequestError if no answer can look like this. Takes up to a tenth of a second."""
    refuse_without_llguidance(wanted)
    from llguidance import LLMatcher

    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(_grammar_of(wanted))
    if is_wrong:
        raise _refused(wanted, messages[0])


def refuse_without_llguidance(wanted: StructuredOutput) -> None:
    """Raise InvalidRequestError where the library for structured output is not installed."""
    if find_spec("llguidance") is None:
        raise InvalidRequestError(
            f"{wanted.param} needs llguidance, which this server does not have; leave it out, or install it "
            "there: pip install llguidance",
            param=wanted.param,
        )


@dataclass(frozen=True, slots=True)
class Grammars:
    """Compiles for one model. `tokenizer_file`: its tokenizer.json; `eos_token_ids`: the end tokens of its
    configuration, by which answers end that are complete. Thread-safe."""

    tokenizer_file: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def of_model(cls, folder: Path, config: ModelConfig) -> Grammars:
        return cls(folder / _TOKENIZER_FILE, config.shape.vocab_size, config.eos_token_ids)

    def prepare(self) -> Future[None]:
        """Begin to read the tokenizer, in a thread. That takes up to a second or two, in which Python runs
        nothing else part of the time: so it must not be left to the first request."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        try:
            return thread.submit(self._read_tokenizer)
        finally:
            thread.shutdown(wait=False)

    def _read_tokenizer(self) -> None:
        if find_spec("llguidance") is None or not self.eos_token_ids or not self.tokenizer_file.exists():
            return
        try:
            _tokenizer(self, self.eos_token_ids)
        except ModelError as error:  # all other requests can be served
            logger.warning("%s; requests that ask for it are refused", error)

    def compile(self, request: EngineRequest) -> AnswerGrammar:
        """Return the state of an answer that has the request's `output_token_ids` so far. May take a second.

        Raises InvalidRequestError if no answer can look like what is asked for."""
        wanted = request.params.structured_output
        assert wanted is not None
        return AnswerGrammar(
            self,
            wanted,
            request.eos_token_ids,
            request.output_token_ids,
            request.cache_salt,
            request.tenant,
        )


class AnswerGrammar:
    """The state of one answer. Pickled, it is the answer's beginning, compiled again where it arrives."""

    def __init__(
        self,
        grammars: Grammars,
        wanted: StructuredOutput,
        eos_token_ids: tuple[int, ...],
        output_token_ids: Sequence[int],
        cache_salt: str = "",
        tenant: str = NO_TENANT,
    ) -> None:
        refuse_without_llguidance(wanted)
        self._origin = (grammars, wanted, eos_token_ids, tuple(output_token_ids), cache_salt, tenant)
        ends = grammars.eos_token_ids or eos_token_ids
        key = (grammars, wanted, ends, cache_salt)
        try:
            compiled = COMPILED.get(key, tenant, lambda: _compiled(grammars, wanted, ends))
            self.matcher = compiled.deep_copy()
        except ModelError as error:
            raise InvalidRequestError(f"{error}; leave {wanted.param} out", param=wanted.param) from error
        self.vocab_size = _tokenizer(grammars, ends).vocab_size
        self.has_ended = False
        """True once it has its end token. Any token may follow, as none is read."""
        for token_id in output_token_ids:
            if self.has_ended or not self.matcher.consume_token(token_id):
                raise InvalidRequestError(
                    f"output_token_ids are not the beginning of an answer that follows {wanted.param}; leave "
                    "one of them out",
                    param="output_token_ids",
                )
            self.has_ended = token_id in eos_token_ids
        if self.has_ended:
            raise InvalidRequestError(
                "output_token_ids are an answer that has ended; leave out its end token",
                param="output_token_ids",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return AnswerGrammar, self._origin

    @property
    def error(self) -> str | None:
        """Why no token can follow; None if one can."""
        if self.has_ended or not self.matcher.is_error():
            return None
        wanted = self._origin[1]
        return f"the answer cannot go on as {wanted.param} asks: {_reason(wanted, self.matcher.get_error())}"

    @property
    def param(self) -> str:
        """The field of the request that asked for it."""
        return self._origin[1].param

    def accept(self, token_id: int) -> None:
        """Go on after this token."""
        if not self.has_ended:
            self.matcher.consume_token(token_id)
            self.has_ended = token_id in self._origin[2]


def allowed_bits(grammars: Sequence[AnswerGrammar]) -> npt.NDArray[np.int64]:
    """Return for each answer which tokens may follow: a bit for each, in integers of eight bytes. The answers
    must be of one tokenizer."""
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

    masks = allocate_token_bitmask(len(grammars), grammars[0].vocab_size)
    going_on = [(each.matcher, row) for row, each in enumerate(grammars) if not each.has_ended]
    if going_on:
        fill_next_token_bitmask_par(_threads(), going_on, masks)
    odd = masks.shape[1] % 2
    return np.pad(masks, ((0, 0), (0, odd))).view(np.int64)


COMPILED: Final = TenantCache[tuple[Grammars, StructuredOutput, tuple[int, ...], str], "LLMatcher"](
    _CACHED_GRAMMARS
)
"""States of answers that have not begun, by model, what is wanted, end tokens and cache salt."""


def _compiled(grammars: Grammars, wanted: StructuredOutput, eos_token_ids: tuple[int, ...]) -> LLMatcher:
    """Return the state of an answer that has not begun, to be copied."""
    from llguidance import LLMatcher, LLParserLimits

    if not eos_token_ids:
        raise InvalidRequestError(
            f"{wanted.param} needs a model with an end token, and this one names none; leave it out",
            param=wanted.param,
        )
    tokenizer = _tokenizer(grammars, eos_token_ids)
    limits = LLParserLimits(
        initial_lexer_fuel=_FIRST_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        max_lexer_states=_MOST_STATES,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, _grammar_of(wanted), log_level=_SILENT, limits=limits)
    if matcher.is_error():
        raise _refused(wanted, matcher.get_error())
    _probe(matcher.deep_copy(), wanted, tokenizer)
    return matcher


def _probe(matcher: LLMatcher, wanted: StructuredOutput, tokenizer: LLTokenizer) -> None:
    """Raise InvalidRequestError if an answer cannot begin, or only with more work than it may cause."""
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    for _ in range(_PROBED_TOKENS):
        bits = allocate_token_bitmask(1, tokenizer.vocab_size)
        fill_next_token_bitmask(matcher, bits)
        if matcher.is_error():
            raise _refused(wanted, matcher.get_error())
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        going_on = [token_id for token_id in allowed.tolist() if token_id not in tokenizer.eos_tokens]
        if not going_on:
            return
        matcher.consume_token(going_on[-1])


@lru_cache(maxsize=4)
def _tokenizer(grammars: Grammars, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(grammars.tokenizer_file))
    except Exception as error:  # the library raises no narrower type
        raise ModelError(
            f"{grammars.tokenizer_file}: it cannot be read for structured output: {error}"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    num_tokens = max(backend.get_vocab_size(), grammars.vocab_size)
    try:
        return LLTokenizer(backend.to_str(), n_vocab=num_tokens, eos_token=list(eos_token_ids))
    except ValueError as error:
        raise ModelError(
            f"{grammars.tokenizer_file}: llguidance cannot use it for structured output: {error}"
        ) from error


@lru_cache(maxsize=1)
def _threads() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor()


def _grammar_of(wanted: StructuredOutput) -> str:
    """Return the grammar in llguidance's notation. Raise InvalidRequestError if it cannot be written so."""
    from llguidance import LLMatcher, grammar_from

    try:
        if wanted.kind in (OutputKind.JSON, OutputKind.GRAMMAR):
            refuse_large_multiples(wanted.text)
        if wanted.kind is not OutputKind.CHOICE:
            refuse_many_repetitions(wanted.text)
        match wanted.kind:
            case OutputKind.JSON | OutputKind.JSON_OBJECT:
                schema = _ANY_OBJECT if wanted.kind is OutputKind.JSON_OBJECT else closed_schema(wanted.text)
                return LLMatcher.grammar_from_json_schema(
                    schema, overrides={"whitespace_pattern": JSON_WHITESPACE}
                )
            case OutputKind.REGEX if ends_in_escape(wanted.text):
                raise ValueError("it ends in a backslash that escapes nothing")
            case OutputKind.REGEX:
                return grammar_from("regex", ascii_classes(wanted.text))
            case OutputKind.CHOICE:
                return grammar_from("choice", wanted.text)
            case OutputKind.GRAMMAR:
                return grammar_from("grammar", wanted.text)
    except ValueError as error:
        raise _refused(wanted, str(error)) from error


def _refused(wanted: StructuredOutput, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{wanted.param}: {_reason(wanted, message)}", param=wanted.param)


def _reason(wanted: StructuredOutput, message: str) -> str:
    """Return in one line what is wrong, and the fix, for what llguidance says."""
    name = _NAMES[wanted.kind]
    for reason, phrases in _TOO_LARGE.items():
        if any(phrase in message for phrase in phrases):
            return f"the {name} {reason}"
    return f"{_in_one_line(message)}; correct the {name}"


def _in_one_line(message: str) -> str:
    if "NoExtension" in message:
        return "no text follows it"
    if message.startswith("panic"):
        return "it is not supported"
    lines = message.splitlines() or [""]
    found = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return found.rstrip(":. ")
