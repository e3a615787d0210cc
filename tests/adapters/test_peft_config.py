from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import pytest
from adapter_factory import SHAPE, make_config
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.adapters.peft_config import MAX_CONFIG_BYTES, judge_config, parse_config
from loraplex.adapters.peft_fields import HONOURED, NO_EFFECT, REFUSED_UNLESS_OFF
from loraplex.adapters.targets import plan_targets
from loraplex.core.errors import AdapterError, AdapterFormatError


def refusals_of(**overrides: Any) -> dict[str | None, str]:
    return {error.field: str(error) for error in judge_config(make_config(**overrides)).refusals}


def test_every_field_of_the_installed_peft_is_classified_exactly_once() -> None:
    from peft import LoraConfig

    tables = [set(HONOURED), set(NO_EFFECT), set(REFUSED_UNLESS_OFF)]
    known = set().union(*tables)
    assert {field.name for field in dataclasses.fields(LoraConfig)} == known
    assert sum(len(table) for table in tables) == len(known)


def test_the_defaults_of_peft_are_not_refused() -> None:
    from peft import LoraConfig

    config = LoraConfig(target_modules=["q_proj"]).to_dict()
    config["target_modules"] = sorted(config["target_modules"])
    verdict = judge_config(config)
    assert verdict.refusals == ()
    assert verdict.settings is not None
    assert {each.field for each in (*verdict.honoured, *verdict.no_effect)} == set(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("modules_to_save", ["embed_tokens"]),
        ("trainable_token_indices", [1, 2]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("layer_replication", [[0, 4], [2, 5]]),
        ("alora_invocation_tokens", [5, 6]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 2}),
        ("velora_config", {"scale": 1.0}),
        ("monteclora_config", {"num_samples": 4}),
        ("kasa_config", {"beta": 1.0}),
        ("megatron_config", {"hidden_size": 8}),
        ("peft_type", "LOHA"),
        ("a_field_from_the_future", 0),
        ("a_field_from_the_future", "on"),
    ],
)
def test_a_field_that_changes_the_result_is_refused_by_name(field: str, value: object) -> None:
    refusals = refusals_of(**{field: value})
    assert list(refusals) == [field]
    assert f"{field} = {json.dumps(value)}" in refusals[field]


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_field_that_is_off_is_listed_as_without_effect(value: object) -> None:
    verdict = judge_config(make_config(enable_lora=value))
    assert verdict.refusals == ()
    assert "enable_lora" in {each.field for each in verdict.no_effect}


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "corda", "lora_ga", "loftq", "novel"])
def test_initialisations_that_change_the_base_are_refused(init: str) -> None:
    assert list(refusals_of(init_lora_weights=init)) == ["init_lora_weights"]


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_alone_are_accepted(init: object) -> None:
    assert refusals_of(init_lora_weights=init) == {}


@pytest.mark.parametrize("rank", ["8", -1, 0, True, 8.0, None, [8], 10**30])
def test_a_rank_that_is_no_positive_whole_number_is_refused(rank: object) -> None:
    assert list(refusals_of(r=rank)) == ["r"]
    [field] = refusals_of(rank_pattern={"q_proj": rank})
    assert field == "rank_pattern['q_proj']"


@pytest.mark.parametrize("alpha", ["16", True, None, 10**400, [1]])
def test_an_alpha_that_is_no_finite_number_is_refused(alpha: object) -> None:
    assert list(refusals_of(lora_alpha=alpha)) == ["lora_alpha"]
    assert list(refusals_of(alpha_pattern={"q_proj": alpha})) == ["alpha_pattern['q_proj']"]


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
        ({"target_modules": {"q_proj": 1}}, "target_modules"),
        ({"exclude_modules": 3}, "exclude_modules"),
        ({"layers_to_transform": [0, "1"]}, "layers_to_transform"),
        ({"layers_to_transform": -1}, "layers_to_transform"),
        ({"layers_to_transform": True}, "layers_to_transform"),
        ({"layers_pattern": 7, "layers_to_transform": [0]}, "layers_pattern"),
        ({"layers_pattern": "layers"}, "layers_pattern"),
        ({"layers_to_transform": [0], "target_modules": ".*q_proj"}, "layers_to_transform"),
        ({"rank_pattern": [4]}, "rank_pattern"),
        ({"alpha_pattern": "q_proj"}, "alpha_pattern"),
    ],
)
def test_a_wrong_type_is_refused_by_field(overrides: dict[str, Any], field: str) -> None:
    assert list(refusals_of(**overrides)) == [field]


def test_all_refusals_come_at_once() -> None:
    assert set(refusals_of(use_dora=True, r=0, bias="all", peft_type="IA3")) == {
        "use_dora",
        "r",
        "bias",
        "peft_type",
    }


def test_missing_rank_and_alpha_are_shown_as_the_defaults_of_peft() -> None:
    verdict = judge_config({"peft_type": "LORA", "target_modules": ["q_proj"]})
    assert verdict.settings is not None
    assert (verdict.settings.rank, verdict.settings.alpha) == (8, 8)
    assert {each.field for each in verdict.honoured} >= {"r", "lora_alpha"}


def test_a_config_without_peft_type_is_refused() -> None:
    config = make_config()
    del config["peft_type"]
    assert [error.field for error in judge_config(config).refusals] == ["peft_type"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"r": 8,}', "not valid JSON"),
        (b'{"r": NaN}', "NaN is not a JSON number"),
        (b'{"r": 8, "r": 16}', "'r' appears twice"),
        (b'{"rank_pattern": {"a": 1, "a": 2}}', "'a' appears twice"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[]", "holds a list"),
        (b'"LORA"', "holds a string"),
        (b"null", "holds null"),
        (b"8", "holds a number"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"r": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), f"more than {MAX_CONFIG_BYTES} bytes"),
    ],
)
def test_bytes_that_are_no_config_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(AdapterFormatError, match=message):
        parse_config(raw)


def test_control_characters_of_a_config_do_not_reach_the_message() -> None:
    verdict = judge_config(make_config(**{"\x1b[2Jevil": 1}))
    assert all(str(error).isprintable() for error in verdict.refusals)


# No quantifiers: those would run in a process of their own, too slow for hundreds of examples.
_TEXT = st.text(alphabet="aZ9_.^$\\é", max_size=12)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=8,
)
_NAMES = st.sampled_from(["q_proj", "model.layers.0.self_attn.q_proj", "lm_head", "", "^", "\\", "$"])
_FIELDS = st.sampled_from(sorted(HONOURED | set(NO_EFFECT) | set(REFUSED_UNLESS_OFF)))
_CONFIGS = st.dictionaries(
    _FIELDS | _TEXT,
    _JSON | _NAMES | st.lists(_NAMES, max_size=3) | st.dictionaries(_NAMES, st.integers(-1, 9), max_size=3),
    max_size=8,
)


@settings(max_examples=examples(80, 200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=_CONFIGS)
def test_no_config_raises_anything_but_adapter_errors(config: dict[str, Any]) -> None:
    parsed = parse_config(json.dumps(config).encode())
    verdict = judge_config(parsed)
    assert (verdict.settings is not None) or verdict.refusals
    classified = {each.field for each in (*verdict.honoured, *verdict.no_effect)}
    assert set(parsed) <= classified | {error.field for error in verdict.refusals}
    if verdict.settings is not None:
        plan = plan_targets(verdict.settings, SHAPE)
        assert all(isinstance(error, AdapterError) for error in plan.refusals)
        assert plan.modules or plan.refusals


@settings(max_examples=examples(100, 300), deadline=None)
@given(raw=st.binary(max_size=64))
def test_no_bytes_raise_anything_but_adapter_errors(raw: bytes) -> None:
    with contextlib.suppress(AdapterError):
        parse_config(raw)
