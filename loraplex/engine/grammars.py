"""Structured output: compiles what an answer must look like, and says which tokens it may go on with.

llguidance does the work. Compiling is cached, and takes from well under a millisecond to a tenth of a
second; the first compilation of a process also reads the tokenizer.
"""

from __future__ import annotations

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
from loraplex.engine.schema_rules import ascii_classes, closed_schema

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from loraplex.model.config import ModelConfig

_TOKENIZER_FILE: Final = "tokenizer.json"
_WHITESPACE: Final = r"[ \t\r\n]{0,32}"
"""Whitespace between the tokens of JSON. It has an end: models without an idea of how to go on would write it
up to max_tokens."""
_ANY_OBJECT: Final = '{"type": "object"}'
_CACHED_GRAMMARS: Final = 64
_SILENT: Final = 0
_NAMES: Final = {
    OutputKind.JSON: "JSON schema",
    OutputKind.JSON_OBJECT: "JSON schema",
    OutputKind.REGEX: "regular expression",
    OutputKind.CHOICE: "list of choices",
    OutputKind.GRAMMAR: "grammar",
}


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
        if find_spec("llguidance") is not None and self.eos_token_ids and self.tokenizer_file.exists():
            _tokenizer(self, self.eos_token_ids)

    def compile(self, request: EngineRequest) -> AnswerGrammar:
        """Return the state of an answer that has the request's `output_token_ids` so far. May take a second.

        Raises InvalidRequestError if no answer can look like what is asked for."""
        wanted = request.params.structured_output
        assert wanted is not None
        return AnswerGrammar(self, wanted, request.eos_token_ids, request.output_token_ids)


class AnswerGrammar:
    """The state of one answer. Pickled, it is the answer's beginning, compiled again where it arrives."""

    def __init__(
        self,
        grammars: Grammars,
        wanted: StructuredOutput,
        eos_token_ids: tuple[int, ...],
        output_token_ids: Sequence[int],
    ) -> None:
        refuse_without_llguidance(wanted)
        self._origin = (grammars, wanted, eos_token_ids, tuple(output_token_ids))
        ends = grammars.eos_token_ids or eos_token_ids
        self.matcher = _compiled(grammars, wanted, ends).deep_copy()
        self.vocab_size = _tokenizer(grammars, ends).vocab_size
        self.has_ended = False
        """True once it has its end token. Any token may follow, as none is read."""
        for token_id in output_token_ids:
            self.accept(token_id)

    def __reduce__(self) -> tuple[Any, ...]:
        return AnswerGrammar, self._origin

    @property
    def error(self) -> str | None:
        """Why no token can follow; None if one can."""
        if self.has_ended or not self.matcher.is_error():
            return None
        _, wanted, _, _ = self._origin
        return f"the answer cannot go on as {wanted.param} asks: {_first_line(self.matcher.get_error())}"

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


@lru_cache(maxsize=_CACHED_GRAMMARS)
def _compiled(grammars: Grammars, wanted: StructuredOutput, eos_token_ids: tuple[int, ...]) -> LLMatcher:
    """Return the state of an answer that has not begun, to be copied."""
    from llguidance import LLMatcher

    if not eos_token_ids:
        raise InvalidRequestError(
            f"{wanted.param} needs a model with an end token, and this one names none; leave it out",
            param=wanted.param,
        )
    tokenizer = _tokenizer(grammars, eos_token_ids)
    matcher = LLMatcher(tokenizer, _grammar_of(wanted), log_level=_SILENT)
    if matcher.is_error():
        raise _refused(wanted, matcher.get_error())
    return matcher


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
    return LLTokenizer(backend.to_str(), n_vocab=num_tokens, eos_token=list(eos_token_ids))


@lru_cache(maxsize=1)
def _threads() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor()


def _grammar_of(wanted: StructuredOutput) -> str:
    """Return the grammar in llguidance's notation. Raise InvalidRequestError if it cannot be written so."""
    from llguidance import LLMatcher, grammar_from

    try:
        match wanted.kind:
            case OutputKind.JSON | OutputKind.JSON_OBJECT:
                schema = _ANY_OBJECT if wanted.kind is OutputKind.JSON_OBJECT else closed_schema(wanted.text)
                return LLMatcher.grammar_from_json_schema(
                    schema, overrides={"whitespace_pattern": _WHITESPACE}
                )
            case OutputKind.REGEX:
                return grammar_from("regex", ascii_classes(wanted.text))
            case OutputKind.CHOICE:
                return grammar_from("choice", wanted.text)
            case OutputKind.GRAMMAR:
                return grammar_from("grammar", wanted.text)
    except ValueError as error:
        raise _refused(wanted, str(error)) from error


def _refused(wanted: StructuredOutput, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{wanted.param}: {_first_line(reason)}; correct the {_NAMES[wanted.kind]}", param=wanted.param
    )


def _first_line(message: str) -> str:
    return message.partition("\n")[0].rstrip(":. ")
