"""Answers that must look like something, from a tiny random model, which would never write them by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from driving import run_to_end
from serving_fakes import hf_tokenizer

from loraplex.core.errors import InvalidRequestError
from loraplex.core.request import EngineRequest, FinishReason
from loraplex.core.sampling import SamplingParams
from loraplex.core.structured_output import MAX_CHARS, OutputKind, StructuredOutput
from loraplex.engine.build import build_core
from loraplex.engine.core import Engine
from loraplex.engine.grammars import COMPILED, Grammars
from loraplex.engine.llm import LLM
from loraplex.engine.options import EngineOptions
from loraplex.engine.schema_rules import ascii_classes
from loraplex.model.config import load_config

PROMPT = [(11 * index + 5) % 256 + 70 for index in range(20)]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
MANY_RULES = "start: " + " | ".join(f"r{i}" for i in range(2500))
MANY_RULES += "".join(f'\nr{i}: "a{i}"' for i in range(2500))
BOUNDED = '{"type": "integer", "minimum": 1, "maximum": 1000000000000, "multipleOf": 7919}'
COPRIME = {
    "type": "object",
    "properties": {"a": {"type": "integer", "multipleOf": 2003}},
    "patternProperties": {"^a": {"type": "integer", "multipleOf": 2011}},
}
LISTED = r"\d{2}(, \d{2}){1,3}"
WANTED = {
    "json": StructuredOutput(OutputKind.JSON, json.dumps(SCHEMA)),
    "regex": StructuredOutput(OutputKind.REGEX, LISTED),
    "choice": StructuredOutput(OutputKind.CHOICE, json.dumps(["yes", "no", 'a "quoted"\nline'])),
    "lark": StructuredOutput(OutputKind.GRAMMAR, 'start: "(" (start | "x") ")"'),
    "gbnf": StructuredOutput(OutputKind.GRAMMAR, 'root ::= ("ab" | [0-9]) "."'),
}


def follows(kind: str, text: str) -> bool:
    match kind:
        case "json":
            found = json.loads(text)
            return (
                found.keys() == SCHEMA["properties"].keys()
                and len(found["name"]) <= 6
                and 0 <= found["age"] <= 120
                and set(found["tags"]) <= {"red", "blue"}
                and len(found["tags"]) <= 2
            )
        case "regex":
            return re.fullmatch(LISTED, text) is not None
        case "choice":
            return text in ("yes", "no", 'a "quoted"\nline')
        case "lark":
            return text == "(" * (len(text) // 2) + "x" + ")" * (len(text) // 2)
        case _:
            return re.fullmatch(r"(ab|[0-9])\.", text) is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    # More tokens than the tokenizer has: those must never be chosen.
    tiny.save_model(path, vocab_size=448, max_position_embeddings=512)
    hf_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), kv_memory_bytes=4 << 20) as made:
        yield made


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    core = build_core(EngineOptions(model=str(folder), kv_memory_bytes=1 << 20))
    yield core
    core.check_integrity()
    assert core.stats().num_kv_blocks_used == 0, "blocks leaked"
    core.close()


def request(
    request_id: str, wanted: StructuredOutput | None, output: tuple[int, ...] = (), **params: object
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        params=SamplingParams(**{"max_tokens": 200, "structured_output": wanted, **params}),  # type: ignore[arg-type]
        eos_token_ids=(2,),
        output_token_ids=output,
    )


@pytest.mark.parametrize("kind", WANTED)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.5, "seed": 3, "n": 3},
        {"top_p": 0.9, "top_k": 40, "seed": 1, "logprobs": 2},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "seed": 2},
    ],
    ids=str,
)
def test_answers_look_as_they_must(llm: LLM, kind: str, options: dict[str, object]) -> None:
    params = SamplingParams(max_tokens=490, structured_output=WANTED[kind], **options)  # type: ignore[arg-type]
    [done] = llm.generate("Hello world!", params=params)
    for choice in done.choices:
        assert choice.finish_reason is FinishReason.STOP, choice.text
        assert follows(kind, choice.text), choice.text


def test_other_requests_of_the_batch_are_not_changed(llm: LLM) -> None:
    free = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    held = SamplingParams(max_tokens=200, structured_output=WANTED["json"], seed=1)
    [alone] = llm.generate("How are you", params=free)
    [held_alone] = llm.generate("Hello", params=held)
    together = llm.generate(["How are you", "Hello", "How are you"], params=[free, held, free])
    assert [each.choices[0].text for each in together] == [
        alone.choices[0].text,
        held_alone.choices[0].text,
        alone.choices[0].text,
    ]


def test_a_text_cut_off_by_max_tokens_is_the_beginning_of_one_that_follows(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, structured_output=WANTED["json"])
    [done] = llm.generate("Hello", params=params)
    assert done.choices[0].finish_reason is FinishReason.LENGTH
    assert done.choices[0].text.lstrip().startswith("{")


def test_an_answer_goes_on_where_another_engine_stopped(engine: Engine) -> None:
    engine.add_request(request("whole", WANTED["json"], seed=5))
    whole = run_to_end(engine)["whole"].token_ids
    for cut in (1, len(whole) // 2, len(whole) - 1):
        engine.add_request(request("rest", WANTED["json"], tuple(whole[:cut]), seed=5))
        assert run_to_end(engine)["rest"].token_ids == whole[cut:]


def test_preempted_answers_still_follow(folder: Path, engine: Engine) -> None:
    small = build_core(EngineOptions(model=str(folder), kv_memory_bytes=200_000))
    wanted = {f"r{seed}": request(f"r{seed}", WANTED["json"], seed=seed) for seed in range(7)}
    for each in wanted.values():
        small.add_request(each)
        engine.add_request(each)
    assert {k: v.token_ids for k, v in run_to_end(small).items()} == {
        k: v.token_ids for k, v in run_to_end(engine).items()
    }
    assert small.stats().num_preemptions > 0
    small.check_integrity()
    small.close()


def test_a_request_cancelled_while_it_is_compiled_leaves_nothing(engine: Engine) -> None:
    engine.add_request(request("a", WANTED["json"]))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request(request("a", WANTED["json"]))
    engine.cancel("a")
    assert run_to_end(engine) == {}


def test_what_only_the_engine_can_refuse_ends_the_request(engine: Engine) -> None:
    engine.add_request(request("a", StructuredOutput(OutputKind.REGEX, "(", param="guided_regex")))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    [output] = outputs
    assert (output.finish_reason, output.error_param) == (FinishReason.ERROR, "guided_regex")


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (OutputKind.JSON, '{"type": "strin"}', "Invalid type: strin; correct the JSON schema"),
        (OutputKind.JSON, '{"$ref": "http://example.com/x"}', "does not fetch"),
        (OutputKind.JSON, '{"enum": []}', "Unsatisfiable"),
        (OutputKind.JSON, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (OutputKind.JSON, "[]", "object schema"),
        (OutputKind.JSON, "nope", "correct the JSON schema"),
        (
            OutputKind.JSON,
            '{"type":"array","items":' * 2000 + "{}" + "}" * 2000,
            "the JSON schema is nested too",
        ),
        (OutputKind.REGEX, "(" * 300 + "a" + ")" * 300, "is nested too deeply; use fewer levels"),
        (OutputKind.GRAMMAR, "start: " + "(" * 300 + '"a"' + ")" * 300, "the grammar is nested too deeply"),
        (OutputKind.GRAMMAR, "root ::= " + "(" * 2000 + '"a"' + ")" * 2000, "is nested too deeply"),
        (OutputKind.REGEX, "a(", "correct the regular expression"),
        (OutputKind.REGEX, "(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
        (OutputKind.REGEX, "abc\\", "a backslash that escapes nothing"),
        (OutputKind.GRAMMAR, 'start: "a" | x', "correct the grammar"),
        (OutputKind.GRAMMAR, "", "correct the grammar"),
    ],
)
def test_what_no_answer_can_follow_is_refused(llm: LLM, kind: OutputKind, text: str, message: str) -> None:
    params = SamplingParams(structured_output=StructuredOutput(kind, text))
    with pytest.raises(InvalidRequestError, match=re.escape(message)) as refused:
        llm.generate("Hello", params=params)
    assert refused.value.param == "structured_outputs"
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (OutputKind.REGEX, "a{1000000000}", "too much work; make repetitions and lengths smaller"),
        (OutputKind.REGEX, "a{100000}", "too much work"),
        (OutputKind.REGEX, "(((((x{50}){50}){50}){50}){50})", "too much work"),
        (OutputKind.GRAMMAR, 'start: "a"{100000}', "too much work"),
        (OutputKind.GRAMMAR, "start: X\nX: /.*a.{30}/ & /.*b.{30}/ & /.*c.{30}/", "too much work"),
        (OutputKind.GRAMMAR, MANY_RULES, "the grammar has too many rules, alternatives or optional"),
        (OutputKind.JSON, '{"type": "integer", "multipleOf": 9999991}', "multipleOf takes too much work"),
        (OutputKind.JSON, '{"type": "number", "multiple\\u004ff": 0.09999991}', "multipleOf takes too much"),
        (OutputKind.JSON, BOUNDED, "multipleOf takes too much work; use numbers whose sum"),
        (OutputKind.REGEX, ".*" * 4700, "it repeats 4,700 times with * and +; use up to 1,000"),
        (OutputKind.REGEX, ".*" * 500, "takes too much work; make repetitions"),
        (OutputKind.JSON, json.dumps(COPRIME), "multipleOf takes too much work"),
        (OutputKind.GRAMMAR, 'start: %json {"type": "integer", "multipleOf": 9999991}', "multipleOf takes"),
        (OutputKind.JSON, '{"$ref": "#"}', "no text follows it"),
        (OutputKind.REGEX, r"[^\s\S]", "no text follows it"),
        (OutputKind.GRAMMAR, "start: start", "no text follows it"),
        (OutputKind.GRAMMAR, 'start: a b\na[lazy]: /.*/\nb: "x"', "not supported"),
    ],
)
def test_what_only_shows_with_the_first_tokens_is_refused_before_an_answer(
    engine: Engine, kind: OutputKind, text: str, words: str
) -> None:
    engine.add_request(request("a", StructuredOutput(kind, text, param="guided_regex")))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    [output] = outputs
    assert (output.finish_reason, output.error_param) == (FinishReason.ERROR, "guided_regex")
    assert words in (output.error or "")


@pytest.mark.parametrize("begun", [(92,), (2,), (67, 68, 2)])
def test_an_answer_begun_otherwise_is_refused(engine: Engine, begun: tuple[int, ...]) -> None:
    engine.add_request(request("a", StructuredOutput(OutputKind.REGEX, "[a-c]{2,9}"), begun))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert [each.error_param for each in outputs] == ["output_token_ids"]


def test_limits_and_contradictions_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="65,537 characters"):
        StructuredOutput(OutputKind.REGEX, "a" * (MAX_CHARS + 1))
    for option in ("ignore_eos", "min_tokens"):
        with pytest.raises(InvalidRequestError, match=f"{option} does not go with") as refused:
            SamplingParams(**{option: 1}, structured_output=WANTED["json"])  # type: ignore[arg-type]
        assert refused.value.param == option


def test_a_model_without_an_end_token_is_refused_in_words(folder: Path) -> None:
    endless = EngineRequest(
        request_id="a", prompt_token_ids=PROMPT, params=SamplingParams(structured_output=WANTED["json"])
    )
    with pytest.raises(InvalidRequestError, match="end token"):
        Grammars(folder / "tokenizer.json", 448).compile(endless)


def test_objects_have_the_properties_that_are_named_and_no_others(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    params = SamplingParams(
        structured_output=StructuredOutput(OutputKind.JSON, json.dumps(schema)), max_tokens=200, n=5, seed=1
    )
    [done] = llm.generate("Hello", params=params)
    assert [json.loads(each.text) for each in done.choices] == [{"a": 1}] * 5


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (r"\d+", "[0-9]+"),
        (r"[\d.]\\d", r"[0-9.]\\d"),
        (r"\w\[\d]", r"[0-9A-Za-z_]\[[0-9]]"),
        ("[]\\d]", "[]0-9]"),
        (r"[^]\w]x\D", r"[^]0-9A-Za-z_]x\D"),
        ("a\\", "a\\"),
    ],
)
def test_digits_and_letters_are_those_of_ascii(given: str, meant: str) -> None:
    assert ascii_classes(given) == meant


def compile_for(grammars: Grammars, tenant: str, pattern: str = "[ab]{3}", salt: str | None = None) -> int:
    """Compile a regular expression, and return how many grammars were compiled so far."""
    grammars.compile(
        EngineRequest(
            request_id="r",
            prompt_token_ids=[1],
            params=SamplingParams(structured_output=StructuredOutput(OutputKind.REGEX, pattern)),
            eos_token_ids=(2,),
            tenant=tenant,
            cache_salt=tenant if salt is None else salt,
        )
    )
    return COMPILED.num_made


def test_what_one_salt_had_compiled_is_compiled_again_for_another(folder: Path) -> None:
    grammars = Grammars.of_model(folder, load_config(folder))
    compiled = [compile_for(grammars, tenant) for tenant in ("acme", "globex", "acme", "")]
    first = compiled[0]
    assert compiled == [first, first + 1, first + 1, first + 2]


def test_one_tenant_cannot_displace_what_others_had_compiled(folder: Path) -> None:
    grammars = Grammars.of_model(folder, load_config(folder))
    compile_for(grammars, "quiet", "[cd]{3}")
    for number in range(80):  # with salts of its own, too
        num_compiled = compile_for(grammars, "greedy", "[cd]{3}", salt=f"greedy/{number}")
    assert compile_for(grammars, "quiet", "[cd]{3}") == num_compiled
    assert compile_for(grammars, "greedy", "[cd]{3}", salt="greedy/79") == num_compiled
    assert compile_for(grammars, "greedy", "[cd]{3}", salt="greedy/0") == num_compiled + 1
