"""A request's options are validated where they come in, and not for each copy that is made of them."""

from __future__ import annotations

import pytest
from server_fixtures import USER, Api

from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams


def test_the_options_of_a_request_are_validated_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    validated: list[SamplingParams] = []
    validate = SamplingParams.__post_init__

    def counted(params: SamplingParams) -> None:
        validated.append(params)
        validate(params)

    monkeypatch.setattr(SamplingParams, "__post_init__", counted)
    body = {"model": "base", "messages": USER, "n": 2, "seed": 7, "stop": ["x"], "bad_words": ["y"]}
    assert api.post("/v1/chat/completions", body).status_code == 200
    assert len(validated) == 1
    first: EngineRequest = api.served.engine.requests[0]
    assert (first.params.n, first.params.stop) == (1, ())
    assert first.params.max_tokens is not None
    assert first.params.bad_word_ids


def test_a_changed_copy_has_the_other_fields_and_no_others() -> None:
    params = SamplingParams(temperature=0.5, seed=3, stop=("x",))
    assert params.changed(n=2) == SamplingParams(temperature=0.5, seed=3, stop=("x",), n=2)
    with pytest.raises(AssertionError, match="max_token"):
        params.changed(max_token=5)
