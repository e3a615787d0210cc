"""Decides how a chat request's answer is made and read: its tools, its reasoning, special tokens in its
text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from loraplex.core.sampling import SamplingParams
from loraplex.core.structured_output import StructuredOutput
from loraplex.engine.tokenizer import Tokenizer
from loraplex.engine.tool_traits import ToolTraits
from loraplex.server.answer_reader import AnswerReading, ReasoningReading
from loraplex.server.chat_options import ChatOptions
from loraplex.server.reasoning import END_THINK, THINK
from loraplex.server.requests import ChatRequest, SamplingFields
from loraplex.server.tool_calls.call_grammar import Thinking
from loraplex.server.tool_calls.formats import MARKS, NAME_MARK
from loraplex.server.tool_calls.tool_use import ToolUse, tool_use

_TAIL_TOKENS: Final = 16
"""Tokens at the end of a prompt that show whether reasoning has begun or ended there."""


@dataclass(frozen=True, kw_only=True)
class ChatPlan:
    """`params`: the sampling options, with the grammar that calls need. `parts`: schemas in it. `shown_ids`:
    special tokens that are part of the text. `reading`: None if the text is the content."""

    params: SamplingParams
    parts: Sequence[StructuredOutput]
    shown_ids: frozenset[int]
    reading: AnswerReading | None


def chat_tools(body: ChatRequest, template: str, traits: ToolTraits, options: ChatOptions) -> ToolUse | None:
    """Return how the request's tools are used; None if its answer may call none. `template`: the source of
    the chat template; `traits`: what it does with tools."""
    return tool_use(
        body.tools,
        body.tool_choice,
        is_parallel=body.parallel_tool_calls is not False,
        template=template,
        is_own_template=body.chat_template is not None,
        traits=traits,
        options=options,
    )


def plan_chat(
    body: ChatRequest,
    params: SamplingParams,
    prompt: Sequence[int],
    tools: ToolUse | None,
    *,
    template: str,
    tokenizer: Tokenizer,
    options: ChatOptions,
) -> ChatPlan:
    """Return the plan, which depends on whether the prompt ends in reasoning. Takes some milliseconds where
    tools have large schemas."""
    wanted = params.structured_output
    thinking = Thinking.NONE
    # A schema of the client's own is for all of an answer.
    if options.reads_reasoning(template) and (wanted is None or tools is not None):
        thinking = _thinking(tokenizer.decode(prompt[-_TAIL_TOKENS:]))
    if tools is not None:
        params = tools.applied_to(params, thinking=thinking, token_id=tokenizer.token_id)
    reasoning = None
    if thinking is not Thinking.NONE and body.separate_reasoning is not False:
        is_shown = body.include_reasoning is not False
        reasoning = ReasoningReading(has_begun=thinking is Thinking.BEGUN, is_shown=is_shown)
    reading = AnswerReading(calls=None if tools is None else tools.reading, reasoning=reasoning)
    marks: tuple[str, ...] = () if reasoning is None else (THINK, END_THINK)
    if tools is not None:
        found = MARKS[tools.tool_format]
        marks += (found.begin, found.end or found.begin, NAME_MARK)
    parts = () if tools is None else tools.schemas
    return ChatPlan(
        params=params,
        parts=parts if wanted is None or tools is None else (*parts, wanted),
        shown_ids=shown_special_ids(body, tokenizer, marks),
        reading=None if reading == AnswerReading() else reading,
    )


def _thinking(prompt_end: str) -> Thinking:
    end = prompt_end.rstrip()
    if end.endswith(THINK):
        return Thinking.BEGUN
    return Thinking.NONE if end.endswith(END_THINK) else Thinking.POSSIBLE


def shown_special_ids(
    body: SamplingFields, tokenizer: Tokenizer, marks: Sequence[str] = ()
) -> frozenset[int]:
    """Return the special tokens that are part of a request's answer: those that it needs, or all."""
    special_ids = tokenizer.pieces.special_ids
    if body.skip_special_tokens is False:
        return special_ids
    found = {tokenizer.token_id(mark) for mark in marks}
    return frozenset(token_id for token_id in found if token_id in special_ids)
