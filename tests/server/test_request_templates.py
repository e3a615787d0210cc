"""Chat templates that requests bring: rendered apart, whatever they do, and only where they are trusted."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from collections.abc import Iterator
from typing import Any

import pytest
from server_fixtures import USER, Api, make_server
from serving_fakes import tiny_tokenizer
from tool_templates import TEMPLATES

from loraplex.engine.tool_traits import PROBES
from loraplex.server.errors import BusyError
from loraplex.server.request_templates import MAX_TRAITS, RequestTemplates

WRITTEN_OUT = 'tools[0].function.name + " is " + tools[0].function.description'
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


class WatchedTemplates(RequestTemplates):
    """Counts what was rendered with the whole time that a template has."""

    num_timed = 0

    async def _ask(self, process: Process, request: bytes) -> dict[str, str]:
        self.num_timed += 1
        return await super()._ask(process, request)


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One server for all tests: the process that renders templates takes a second to start."""
    api = Api(make_server(tmp_path_factory.mktemp("server")))
    templates = WatchedTemplates()
    object.__setattr__(api.served.deps, "templates", templates)
    yield api
    api.run(templates.close())
    api.close()


def templates_of(trusting: Api) -> WatchedTemplates:
    templates = trusting.served.deps.templates
    assert isinstance(templates, WatchedTemplates)
    return templates


def ask(api: Api, template: str, **fields: Any) -> tuple[int, str]:
    """Return the status and the prompt, or the error."""
    body = {"model": "base", "messages": USER, "chat_template": template, **fields}
    response = api.post("/v1/chat/completions", body)
    if response.status_code != 200:
        assert response.json()["error"]["param"] in ("chat_template", "chat_template_kwargs")
        return response.status_code, response.json()["error"]["message"]
    return 200, tiny_tokenizer().decode(api.served.engine.requests[-1].prompt_token_ids)


def test_a_template_is_refused_where_it_is_not_trusted(api: Api) -> None:
    status, message = ask(api, "{{ messages[0].content }}")
    assert (status, "--trust-request-chat-template" in message) == (400, True)


def test_a_template_makes_the_prompt_and_cannot_stop_the_server(trusting: Api) -> None:
    template = "{{ eos_token }}{{ messages[0].content }}{{ word }}{% if add_generation_prompt %}!{% endif %}"
    kwargs = {"word": "you"}
    assert ask(trusting, template, chat_template_kwargs=kwargs) == (200, "<|im_end|>hiyou!")
    for refused, reason in (
        ("{{ messages", "TemplateSyntaxError"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ 'a' * 10 ** 10 }}", "memory"),
        ("{{ 'a' * 10 ** 7 }}", "10,000,000 characters"),
        (ENDLESS, "longer than 2 seconds"),
    ):
        status, message = ask(trusting, refused)
        assert (status, reason in message) == (400, True), message
    status, message = ask(trusting, "x", chat_template_kwargs={"conversations": []})
    assert (status, "may not hold 'conversations'" in message) == (400, True), message
    assert ask(trusting, template, chat_template_kwargs=kwargs) == (200, "<|im_end|>hiyou!"), "after a kill"


def test_an_answer_that_nobody_waits_for_is_not_the_next_ones(trusting: Api) -> None:
    async def scenario() -> None:
        templates = templates_of(trusting)

        async def render(template: str) -> str:
            return await templates.render(template, [], tools=(), add_generation_prompt=True, variables={})

        assert await render("zero") == "zero"
        given_up = asyncio.create_task(render("first"))
        for _ in range(3):  # it is sent
            await asyncio.sleep(0)
        given_up.cancel()
        assert await render("second") == "second"

    trusting.run(scenario())


def test_tools_are_refused_by_a_template_that_does_not_know_them(trusting: Api) -> None:
    tools = [{"function": {"name": "f"}}]
    body = {"model": "base", "messages": USER, "tools": tools}
    for template, told in (("x", "does not render `tools`"), ("{{ tools }}", "or write them as <tool_call>")):
        error = trusting.post("/v1/chat/completions", {**body, "chat_template": template}).json()["error"]
        assert error["param"] == "chat_template"
        assert told in error["message"]
        assert "model" not in error["message"], "it is the request's"


def test_a_template_with_traps_for_tools_is_found_out(trusting: Api) -> None:
    template = TEMPLATES["llama3 single"].replace("tools | tojson", WRITTEN_OUT)
    tools = [{"function": {"name": "f"}}]
    status, prompt = ask(trusting, template, tools=tools, tool_choice="required")
    assert (status, prompt.startswith("Tools: f is \n<|im_start|>user")) == (200, True), prompt
    wanted = trusting.served.engine.requests[-1].params.structured_output
    assert wanted is not None
    assert '"; " one' not in wanted.text


def test_the_traits_of_a_template_are_found_once_with_the_whole_time_for_each_conversation(
    trusting: Api,
) -> None:
    async def scenario() -> None:
        templates = templates_of(trusting)
        templates.num_timed = 0
        variables = {"eos_token": "<|im_end|>"}
        for template, shows_many_calls in (("llama3 single", False), ("hermes", True)) * 2:
            traits = await templates.tool_traits(TEMPLATES[template], variables)
            assert traits.shows_many_calls is shows_many_calls
        assert templates.num_timed == 2 * len(PROBES)
        for number in range(MAX_TRAITS):
            await templates.tool_traits(str(number), variables)
        templates.num_timed = 0
        await templates.tool_traits("0", variables)
        assert templates.num_timed == 0
        await templates.tool_traits(TEMPLATES["hermes"], variables)
        assert templates.num_timed == len(PROBES), "only the last ones are remembered"

    trusting.run(scenario())


def test_few_wait_for_a_template_and_others_are_told_to_come_again(trusting: Api) -> None:
    async def scenario() -> None:
        templates = templates_of(trusting)

        async def render() -> str:
            return await templates.render("x", [], tools=(), add_generation_prompt=True, variables={})

        found = await asyncio.gather(*(render() for _ in range(6)), return_exceptions=True)
        assert found[:4] == ["x"] * 4
        assert [type(each) for each in found[4:]] == [BusyError] * 2
        assert await render() == "x"

    trusting.run(scenario())
