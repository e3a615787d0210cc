"""Grammars on the device: the same tokens as on the host, one step behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda_engines import CONFIG, interpreted
from driving import run_to_end
from serving_fakes import hf_tokenizer

from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.core.structured_output import OutputKind, StructuredOutput
from loraplex.engine.core import Engine
from loraplex.engine.grammars import Grammars

LISTED = r"[0-9]{2}(, [0-9]{2}){1,2}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    hf_tokenizer().save_pretrained(folder)
    core = interpreted(grammars=Grammars(folder / "tokenizer.json", CONFIG.shape.vocab_size))
    yield core
    core.close()


def request(request_id: str, wanted: StructuredOutput | None, **params: object) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[70, 80, 90, 100],
        params=SamplingParams(**{"max_tokens": 30, "structured_output": wanted, **params}),  # type: ignore[arg-type]
        eos_token_ids=(2,),
    )


def test_tokens_are_those_that_the_host_would_choose(engine: Engine) -> None:
    """Log-probabilities are taken on the host, and the token with them."""
    wanted = StructuredOutput(OutputKind.REGEX, LISTED)
    for name, options in {"greedy": {"temperature": 0.0}, "drawn": {"seed": 3, "top_p": 0.9}}.items():
        engine.add_request(request(f"{name}-device", wanted, **options))
        engine.add_request(request(f"{name}-host", wanted, logprobs=0, **options))
    engine.add_request(request("free", None, temperature=0.0))
    done = run_to_end(engine)
    text = {name: hf_tokenizer().decode(each.token_ids) for name, each in done.items()}
    for name in ("greedy", "drawn"):
        assert re.fullmatch(LISTED, text[f"{name}-device"]), text
        assert done[f"{name}-device"].token_ids == done[f"{name}-host"].token_ids
    assert not re.fullmatch(LISTED, text["free"])


def test_steps_run_ahead_of_grammars_on_the_device(engine: Engine) -> None:
    engine.add_request(request("a", StructuredOutput(OutputKind.CHOICE, json.dumps(["yes", "no"]))))
    ahead = 0
    while engine.has_work():
        engine.step()
        ahead += len(engine._flights)
    assert ahead > 0, "each step was waited for"


def test_bad_words_do_not_come(engine: Engine) -> None:
    def greedy(name: str, **options: object) -> tuple[int, ...]:
        engine.add_request(request(name, None, temperature=0.0, max_tokens=6, **options))
        return tuple(run_to_end(engine)[name].token_ids)

    free = greedy("free")
    without = greedy("without", bad_word_ids=(free[1:4],))
    assert (without[:3], without[3] != free[3]) == (free[:3], True)


def test_a_cancelled_answer_is_forgotten(engine: Engine) -> None:
    wanted = StructuredOutput(OutputKind.REGEX, LISTED)
    for name in ("a", "b"):
        engine.add_request(request(name, wanted, seed=1))
    while engine.stats().num_running < 2:
        engine.step()
    engine.cancel("a")
    engine.add_request(request("a", StructuredOutput(OutputKind.REGEX, "[a-c]{6}"), seed=2))
    done = run_to_end(engine)
    assert re.fullmatch(LISTED, hf_tokenizer().decode(done["b"].token_ids))
    assert re.fullmatch("[a-c]{6}", hf_tokenizer().decode(done["a"].token_ids)), "it read another's token"
    engine.check_integrity()
