"""Makes the prompt of a conversation, by the model's chat template or the request's own."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.core.errors import InvalidRequestError
from loraplex.engine.tool_traits import ToolTraits
from loraplex.server.chat_messages import template_messages
from loraplex.server.chat_plan import chat_tools
from loraplex.server.deps import ServerDeps
from loraplex.server.requests import ChatRequest
from loraplex.server.tool_calls.call_ids import with_accepted_ids
from loraplex.server.tool_calls.formats import knows_tools
from loraplex.server.tool_calls.tool_use import ToolUse


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """`template`: the source of the chat template. `tools`: None if the answer may call none."""

    template: str
    tools: ToolUse | None
    token_ids: list[int]


async def chat_prompt(deps: ServerDeps, body: ChatRequest) -> ChatPrompt:
    """Return the prompt of a request. Raises InvalidRequestError for what its template or its tools cannot
    be."""
    template = _template(deps, body)
    traits = await _tool_traits(deps, body, template)
    tools = chat_tools(body, template, traits, deps.chat)
    return ChatPrompt(template=template, tools=tools, token_ids=await _encode(deps, body, template, tools))


def _template(deps: ServerDeps, body: ChatRequest) -> str:
    """Return the source of a request's chat template. Raises InvalidRequestError for its own one, unless the
    server trusts it."""
    if body.chat_template is None:
        return deps.text.tokenizer.template_text
    if deps.templates is None:
        raise InvalidRequestError(
            "chat_template of a request is not used here; leave it out, or start the server with "
            "--trust-request-chat-template",
            param="chat_template",
        )
    return body.chat_template


async def _tool_traits(deps: ServerDeps, body: ChatRequest, template: str) -> ToolTraits:
    """Return how the chat template renders tools, if the request has any and the template knows them."""
    if not body.tools or body.tool_choice == "none" or not knows_tools(template):
        return ToolTraits()
    if body.chat_template is None or deps.templates is None:
        return await deps.text.prompts.tool_traits()
    return await deps.templates.tool_traits(body.chat_template, deps.text.tokenizer.template_variables)


async def _encode(deps: ServerDeps, body: ChatRequest, template: str, tools: ToolUse | None) -> list[int]:
    prompts = deps.text.prompts
    messages = with_accepted_ids(template_messages(body.messages), deps.chat.tool_format(template))
    add_generation_prompt = body.add_generation_prompt is not False
    for_template = () if tools is None else tools.for_template
    will_be_cut = body.truncate_prompt_tokens is not None
    if body.chat_template is None or deps.templates is None:
        return await prompts.encode_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            template_options=body.chat_template_kwargs,
            tools=for_template,
            will_be_cut=will_be_cut,
        )
    options = body.chat_template_kwargs or {}
    deps.text.tokenizer.check_template_options(options)
    text = await deps.templates.render(
        body.chat_template,
        messages,
        tools=for_template,
        add_generation_prompt=add_generation_prompt,
        variables={**deps.text.tokenizer.template_variables, **options},
    )
    return await prompts.encode_rendered(text, will_be_cut=will_be_cut)
