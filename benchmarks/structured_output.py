"""Measure structured output on a CPU: llguidance, as loraplex uses it, beside xgrammar; its cost to a step.

    pip install xgrammar                                 # only for the comparison; loraplex does not need it
    python -m benchmarks.structured_output libraries     # writes results/structured_libraries.json
    python -m benchmarks.structured_output steps         # writes results/structured_steps.json

libraries: both compile the same schemas for the same random byte-level vocabularies, and compute masks of
allowed tokens along the same answers, in turn. llguidance runs as in the engine. steps: two engines with the
same random model, of the size of the demo's, decode 32 requests each, those of one by schemas; their steps
take turns. Ratios are those within a round. Masks and steps are also given in CPU time of all threads, which
other programs on the machine change less.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.make_checkpoint import Size, write_base
from benchmarks.sources import fingerprints
from loraplex.bench.alternating import quiet_collector
from loraplex.bench.environment import environment
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.core.structured_output import OutputKind, StructuredOutput
from loraplex.engine.build import build_core
from loraplex.engine.core import Engine
from loraplex.engine.grammars import AnswerGrammar, Grammars, allowed_bits
from loraplex.engine.options import EngineOptions

RESULTS: Final = Path(__file__).parent / "results"
PACKAGES: Final = ("loraplex", "llguidance", "xgrammar", "numpy", "torch")
LIBRARIES: Final = "structured_libraries.json"
STEPS: Final = "structured_steps.json"
VOCABULARIES: Final = (32_768, 131_072)
BATCH: Final = 32
ROUNDS: Final = 4
ANSWER_TOKENS: Final = 48
EOS: Final = 0
DEMO: Final = Size(hidden=576, num_layers=30, num_kv_heads=3, mlp_hidden=1536, ranks=(16,), vocab_size=49_152)
"""The layers of the demo's model."""
STEP_ROUNDS: Final = 40
SETTLE_ROUNDS: Final = 4
KV_BYTES: Final = 1 << 29


def record(num_fields: int) -> dict[str, Any]:
    """Return the schema of an object with so many fields of five kinds."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 9999},
        {"enum": ["open", "closed", "waiting", "unknown"]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 8},
        {
            "type": "object",
            "properties": {
                "id": {"type": "string", "pattern": "^[a-z]{2}-[0-9]{4}$"},
                "ok": {"type": "boolean"},
            },
            "required": ["id", "ok"],
        },
    ]
    names = [f"field_{number}" for number in range(num_fields)]
    properties = {name: kinds[number % len(kinds)] for number, name in enumerate(names)}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def instance(num_fields: int) -> dict[str, Any]:
    values = ("a few words, typed by hand", 1234, "waiting", [1.5, 2, 30], {"id": "ab-0042", "ok": True})
    return {f"field_{number}": values[number % len(values)] for number in range(num_fields)}


_CHOICES: Final = [
    f"category {word} {number}" for word in ("sales", "support", "legal") for number in range(8)
]
CASES: Final[dict[str, tuple[OutputKind, str, str]]] = {
    **{
        f"JSON schema, {n} fields": (
            OutputKind.JSON,
            json.dumps(record(n)),
            json.dumps(instance(n), separators=(",", ":")),
        )
        for n in (3, 15, 100)
    },
    "regular expression": (
        OutputKind.REGEX,
        r"[A-Z][a-z]{2,20} [0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2} \+[0-9]{2} [0-9]{6,12}",
        "Thursday 2026-01-02T03:04 +49 1761234567",
    ),
    "choice of 24": (OutputKind.CHOICE, json.dumps(_CHOICES), _CHOICES[-1]),
}
"""Case -> its kind, its text, and an answer to it."""


class Vocabulary:
    """Random byte-level tokens, ASCII mostly: all bytes, words with and without a space, numbers, marks of
    JSON. Token 0 ends an answer."""

    def __init__(self, size: int) -> None:
        draw = random.Random(size)
        found = dict.fromkeys(bytes([each]) for each in range(256))
        marks = ('{"', '":', '", "', '","', '"}', "},", "[]", ", ", ": ", '": "', "]}", ":[", "\n\n")
        found |= dict.fromkeys(mark.encode() for mark in marks)
        found |= dict.fromkeys(str(number).encode() for number in range(1000))
        found |= dict.fromkeys(f"{space}{word}".encode() for space in ("", " ", '"') for word in _WORDS)
        parts = [a + b for a in "bcdfghjklmnprstvwz" for b in ("a", "e", "i", "o", "u", "en", "er", "st")]
        while len(found) < size - 1:
            word = "".join(draw.choices(parts, k=draw.randint(1, 4)))
            found[(draw.choice(("", " ", " ")) + draw.choice((word, word, word.capitalize()))).encode()] = (
                None
            )
        self.tokens: list[bytes] = [b"</s>", *list(found)[: size - 1]]
        self._ids = {token: number for number, token in enumerate(self.tokens) if number != EOS}
        self._longest = max(map(len, self._ids))

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text, the longest first."""
        found, data = [], text.encode()
        while data:
            end = next(n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._ids)
            found.append(self._ids[data[:end]])
            data = data[end:]
        return found

    def write(self, path: Path) -> None:
        """Write it as a tokenizer.json, as which llguidance reads it."""
        letters = _letters()
        spelt = {"".join(letters[each] for each in token): number for token, number in self._ids.items()}
        end = {"id": EOS, "content": "</s>", "special": True}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        model = {"type": "BPE", "vocab": {"</s>": EOS} | spelt, "merges": []}
        split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        document = {
            "version": "1.0",
            "added_tokens": [end | flags],
            "pre_tokenizer": split,
            "decoder": split,
            "model": model,
        }
        path.write_text(json.dumps(document), encoding="utf-8")


_WORDS: Final = (
    "field",
    "field_",
    "open",
    "closed",
    "waiting",
    "true",
    "id",
    "ok",
    "words",
    "category",
    "legal",
)


def _letters() -> dict[int, str]:
    """Return the letter by which byte-level BPE spells each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [each for each in range(256) if each not in plain]
    return {each: chr(each) for each in plain} | {each: chr(256 + at) for at, each in enumerate(others)}


class Lap(NamedTuple):
    """`cpu_s`: of all threads of this process."""

    wall_s: float
    cpu_s: float


class Stopwatch:
    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def lap(self) -> Lap:
        """Return the time since the last lap."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        found = Lap(wall_s - self._wall_s, cpu_s - self._cpu_s)
        self._wall_s, self._cpu_s = wall_s, cpu_s
        return found


class OfLlguidance:
    """Structured output as in the engine."""

    def __init__(self, vocabulary: Vocabulary, folder: Path) -> None:
        self._grammars = Grammars(folder / "tokenizer.json", len(vocabulary.tokens), (EOS,))
        self._grammars.prepare().result()
        self._num_compiled = 0

    def compile(self, kind: OutputKind, text: str) -> Callable[[], AnswerGrammar]:
        self._num_compiled += 1  # never compiled before under this name
        wanted, salt = StructuredOutput(kind, text), str(self._num_compiled)
        AnswerGrammar(self._grammars, wanted, (EOS,), (), salt)
        return lambda: AnswerGrammar(self._grammars, wanted, (EOS,), (), salt)

    def masks(self, answers: Sequence[Any]) -> None:
        allowed_bits(answers)

    def accept(self, answer: Any, token_id: int) -> bool:
        answer.accept(token_id)
        return answer.error is None


class OfXgrammar:
    """xgrammar as its documentation shows it, with its cache of compiled grammars off."""

    def __init__(self, vocabulary: Vocabulary, folder: Path) -> None:
        import xgrammar

        self._library = xgrammar
        info = xgrammar.TokenizerInfo(vocabulary.tokens, stop_token_ids=[EOS])
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher()
        self._bits = np.zeros((BATCH, -(-len(vocabulary.tokens) // 32)), dtype=np.int32)

    def compile(self, kind: OutputKind, text: str) -> Callable[[], Any]:
        if kind is OutputKind.JSON:
            compiled = self._compiler.compile_json_schema(text)
        elif kind is OutputKind.REGEX:
            compiled = self._compiler.compile_regex(text)
        else:
            choices = " | ".join(json.dumps(each) for each in json.loads(text))
            compiled = self._compiler.compile_grammar(f"root ::= {choices}")
        return lambda: self._library.GrammarMatcher(compiled)

    def masks(self, answers: Sequence[Any]) -> None:
        self._batch.batch_fill_next_token_bitmask(list(answers), self._bits)

    def accept(self, answer: Any, token_id: int) -> bool:
        return bool(answer.accept_token(token_id))


def libraries() -> dict[str, Any]:
    """Return for each vocabulary and case what compiling and masks take, of every round."""
    found: dict[str, Any] = {}
    for size in VOCABULARIES:
        vocabulary = Vocabulary(size)
        with tempfile.TemporaryDirectory() as folder:
            vocabulary.write(Path(folder) / "tokenizer.json")
            sides, ready_s = {}, {}
            for name, make in (("llguidance", OfLlguidance), ("xgrammar", OfXgrammar)):
                started = time.perf_counter()
                sides[name] = make(vocabulary, Path(folder))
                ready_s[name] = round(time.perf_counter() - started, 3)
            cases = {}
            for case, (kind, text, answer) in CASES.items():
                ids = vocabulary.ids(answer)
                rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
                for _ in range(ROUNDS):
                    for name, side in sides.items():
                        with quiet_collector():
                            rounds[name].append(_one_round(side, kind, text, ids))
                cases[case] = {"answer_tokens": len(ids), "rounds": rounds}
                print(size, case, {name: each[-1] for name, each in rounds.items()}, flush=True)
        found[str(size)] = {"ready_s": ready_s, "cases": cases}
    return found


def _one_round(side: Any, kind: OutputKind, text: str, ids: Sequence[int]) -> dict[str, float]:
    watch = Stopwatch()
    make = side.compile(kind, text)
    compiled = watch.lap()
    answers, places = [make() for _ in range(BATCH)], [0] * BATCH
    for number in range(BATCH):  # each is elsewhere in its answer
        for _ in range(number * len(ids) // BATCH):
            _go_on(side, answers, places, number, ids, make)
    masks, accepts = list[Lap](), list[Lap]()
    for _ in range(ANSWER_TOKENS):
        watch.lap()
        side.masks(answers)
        masks.append(watch.lap())
        for number in range(BATCH):
            _go_on(side, answers, places, number, ids, make)
        accepts.append(watch.lap())
    return {
        "compile_ms": round(compiled.wall_s * 1e3, 3),
        "compile_cpu_ms": round(compiled.cpu_s * 1e3, 3),
        "mask_cpu_us": round(statistics.fmean(each.cpu_s for each in masks) / BATCH * 1e6, 2),
        "mask_us": round(statistics.fmean(each.wall_s for each in masks) / BATCH * 1e6, 2),
        "slowest_batch_ms": round(max(each.wall_s for each in masks) * 1e3, 3),
        "accept_cpu_us": round(statistics.fmean(each.cpu_s for each in accepts) / BATCH * 1e6, 2),
    }


def _go_on(
    side: Any, answers: list[Any], places: list[int], number: int, ids: Sequence[int], make: Callable[[], Any]
) -> None:
    """Accept the answer's next token; begin it again after its last one."""
    if places[number] == len(ids):
        answers[number], places[number] = make(), 0
    assert side.accept(answers[number], ids[places[number]]), "both accept the answer"
    places[number] += 1


def steps() -> dict[str, Any]:
    """Return the milliseconds of decode steps of 32 requests, without and with schemas, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        write_base(base, seed=0, size=DEMO)
        options = EngineOptions(model=str(base), device="cpu", kv_memory_bytes=KV_BYTES)
        engines = {name: build_core(options) for name in ("plain", "structured")}
        try:
            for name, engine in engines.items():
                _fill(engine, is_structured=name == "structured")
            took: dict[str, list[Lap]] = {name: [] for name in engines}
            with quiet_collector():
                for turn in range(SETTLE_ROUNDS + STEP_ROUNDS):
                    for name, engine in engines.items():
                        lap = _decode(engine)
                        if turn >= SETTLE_ROUNDS:
                            took[name].append(lap)
        finally:
            for engine in engines.values():
                engine.close()
    return {
        "batch": BATCH,
        "schemas": len(STEP_SCHEMAS),
        "step_ms": {name: [round(each.wall_s * 1e3, 2) for each in laps] for name, laps in took.items()},
        "step_cpu_ms": {name: [round(each.cpu_s * 1e3, 2) for each in laps] for name, laps in took.items()},
    }


STEP_SCHEMAS: Final = tuple(
    json.dumps({"type": "array", "items": record(n), "minItems": 200}) for n in (2, 3, 5, 15)
)
"""Answers that do not end while they are timed."""


def batch_of_requests(
    name: str, *, is_structured: bool, prompt_tokens: int, max_tokens: int, temperature: float, eos: int
) -> Iterator[EngineRequest]:
    """Yield the requests of a step, each with one of the schemas or without."""
    for number in range(BATCH):
        wanted = StructuredOutput(OutputKind.JSON, STEP_SCHEMAS[number % len(STEP_SCHEMAS)])
        yield EngineRequest(
            request_id=f"{name}{number}",
            prompt_token_ids=[3 + number, *range(10, 9 + prompt_tokens)],
            params=SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                seed=number,
                ignore_eos=not is_structured,
                structured_output=wanted if is_structured else None,
            ),
            eos_token_ids=(eos,),
        )


def _fill(engine: Engine, *, is_structured: bool) -> None:
    """Add the requests, and run their prompts."""
    for request in batch_of_requests(
        "", is_structured=is_structured, prompt_tokens=16, max_tokens=400, temperature=1.0, eos=2
    ):
        engine.add_request(request)
    started = time.monotonic()
    while len(engine.step()) < BATCH:
        assert time.monotonic() - started < 120, "all prompts are read"


def _decode(engine: Engine) -> Lap:
    watch = Stopwatch()
    outputs = engine.step()
    found = watch.lap()
    assert len(outputs) == BATCH, "no answer has ended"
    assert not any(output.error for output in outputs)
    return found


def _sections() -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    yield "libraries", LIBRARIES, libraries
    yield "steps", STEPS, steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[name for name, _, _ in _sections()])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    [(file, measure)] = [(file, measure) for name, file, measure in _sections() if name == args.what]
    result = environment(PACKAGES) | {"sources": fingerprints(file), "results": measure()}
    (args.out or RESULTS / file).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
