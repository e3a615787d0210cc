"""Tools as clients describe them, and which of them a client wants called."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

MAX_TOOLS: Final = 128
FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class FunctionDefinition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`parameters` is a JSON schema; without it the function has none. `strict`: calls follow the schema even
    if the model chooses whether it calls."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class ChosenFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName


class NamedChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"] = "function"
    function: ChosenFunction


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice
