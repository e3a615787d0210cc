"""Parsing and checking adapter_config.json: which fields are honoured, have no effect, or are refused.

Checking never stops at the first problem: it collects every finding, so that a user sees them all at once.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from loraplex.adapters.peft_fields import (
    BASE_CHANGING_INITS,
    BIAS_OFF,
    HONOURED,
    NO_EFFECT,
    PLAIN_INITS,
    REFUSED_UNLESS_OFF,
    is_off,
)
from loraplex.adapters.spec import CONFIG_FILE
from loraplex.core.errors import AdapterFormatError

OFF: Final = "off"
"""The reason in findings about a feature that the adapter does not use."""

MAX_CONFIG_BYTES: Final = 1_000_000
MAX_RANK: Final = 1_000_000  # far beyond any layer's width; keeps the arithmetic in range

# PEFT's defaults for missing fields.
_DEFAULT_RANK: Final = 8
_DEFAULT_ALPHA: Final = 8

_SHOWN_CHARS: Final = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One config field, its value in the config, and why it is treated as it is."""

    field: str
    value: object
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """The part of a config that decides the result, in PEFT's terms. Hashable, so it can be a cache key for
    plans.

    `target_modules` and `exclude_modules` are a regex (str) or names (tuple). `layers_to_transform` None
    means all layers.
    """

    rank: int = _DEFAULT_RANK
    alpha: float = _DEFAULT_ALPHA
    use_rslora: bool = False
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigVerdict:
    """The findings about a config; `settings` is None if a field that decides the result could not be
    parsed."""

    honoured: tuple[Finding, ...]
    no_effect: tuple[Finding, ...]
    refusals: tuple[AdapterFormatError, ...]
    settings: LoraSettings | None


def parse_config(raw: bytes) -> dict[str, object]:
    """Return the JSON object in the bytes of an adapter_config.json; AdapterFormatError if there is none."""
    if len(raw) > MAX_CONFIG_BYTES:
        raise AdapterFormatError(
            f"{CONFIG_FILE} has more than {MAX_CONFIG_BYTES} bytes; it is not a LoRA config"
        )
    try:
        config = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique_object, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as exc:
        raise AdapterFormatError(
            f"{CONFIG_FILE} is not UTF-8 text (byte {exc.start}); save it as UTF-8"
        ) from exc
    except RecursionError as exc:
        raise AdapterFormatError(f"{CONFIG_FILE} is nested too deeply") from exc
    except ValueError as exc:
        raise AdapterFormatError(f"{CONFIG_FILE} is not valid JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise AdapterFormatError(f"{CONFIG_FILE} holds {_kind(config)}, not a JSON object")
    return config


def judge_config(config: Mapping[str, object]) -> ConfigVerdict:
    """Sort every field of a config into honoured, no effect and refused. Never raises."""
    honoured: list[Finding] = []
    no_effect: list[Finding] = []
    refusals: list[AdapterFormatError] = []
    for field, value in sorted(config.items()):
        if field in HONOURED:
            honoured.append(Finding(field=field, value=value))
        elif field in NO_EFFECT:
            no_effect.append(Finding(field=field, value=value, reason=NO_EFFECT[field]))
        elif field in REFUSED_UNLESS_OFF:
            if is_off(value) or (field == "bias" and value == BIAS_OFF):
                no_effect.append(Finding(field=field, value=value, reason=OFF))
            else:
                refusals.append(_refusal(field, value, REFUSED_UNLESS_OFF[field]))
        elif is_off(value):
            no_effect.append(Finding(field=field, value=value, reason="unknown field, but off"))
        else:
            fix = "this field is not known here and may change the result; remove it if it does not"
            refusals.append(_refusal(field, value, fix))
    for field, default in (("r", _DEFAULT_RANK), ("lora_alpha", _DEFAULT_ALPHA)):
        if field not in config:
            honoured.append(Finding(field=field, value=default, reason="not given; PEFT's default"))
    settings, problems = _SettingsReader(config).read()
    return ConfigVerdict(
        honoured=tuple(honoured),
        no_effect=tuple(no_effect),
        refusals=(*problems, *refusals),
        settings=settings,
    )


def show(value: object) -> str:
    """Return a config value as short JSON text."""
    try:
        return shorten(json.dumps(value), max_chars=_SHOWN_CHARS)
    except RecursionError:  # nested almost as deeply as the parser allows
        return "..."


def shorten(text: str, *, max_chars: int) -> str:
    """Return text from a checkpoint made fit for a message: cut to length, without control characters."""
    text = text if len(text) <= max_chars else text[: max_chars - 3] + "..."
    return text if text.isprintable() else ascii(text)


class _SettingsReader:
    """Reads the honoured fields with their types checked; problems are collected, not raised."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config
        self._problems: list[AdapterFormatError] = []

    def read(self) -> tuple[LoraSettings | None, list[AdapterFormatError]]:
        self._check_peft_type()
        num_before = len(self._problems)
        targets = self._targets()
        settings = LoraSettings(
            rank=self._rank("r", self._config.get("r", _DEFAULT_RANK)),
            alpha=self._number("lora_alpha", self._config.get("lora_alpha", _DEFAULT_ALPHA)),
            use_rslora=self._flag("use_rslora"),
            target_modules=targets,
            exclude_modules=self._names_or_regex("exclude_modules"),
            layers_to_transform=self._layers(),
            layers_pattern=self._layers_pattern(),
            rank_pattern=tuple(
                (key, self._rank(f"rank_pattern[{key!r}]", value))
                for key, value in self._table("rank_pattern")
            ),
            alpha_pattern=tuple(
                (key, self._number(f"alpha_pattern[{key!r}]", value))
                for key, value in self._table("alpha_pattern")
            ),
        )
        self._check_layer_choice(settings)
        understood = len(self._problems) == num_before
        self._check_init()
        return (settings if understood else None), self._problems

    def _refuse(self, field: str, value: object, fix: str) -> None:
        self._problems.append(_refusal(field, value, fix))

    def _check_peft_type(self) -> None:
        if "peft_type" not in self._config:
            self._refuse(
                "peft_type",
                None,
                f'it is missing; is this a PEFT checkpoint? {CONFIG_FILE} should say "LORA"',
            )
        elif self._config["peft_type"] != "LORA":
            self._refuse("peft_type", self._config["peft_type"], "only LORA adapters are served")

    def _check_init(self) -> None:
        init = self._config.get("init_lora_weights", True)
        if init is None or isinstance(init, bool):
            return
        if isinstance(init, str) and init.lower() in PLAIN_INITS:
            return
        if isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
            self._refuse(
                "init_lora_weights",
                init,
                "this initialisation changed the base weights, so the checkpoint is no delta on the base; "
                "save it with save_pretrained(..., path_initial_model_for_weight_conversion=...) or merge it",
            )
        else:
            self._refuse(
                "init_lora_weights", init, "unknown initialisation; it may have changed the base weights"
            )

    def _rank(self, field: str, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANK:
            return value
        self._refuse(field, value, f"a rank is a whole number from 1 to {MAX_RANK}")
        return 1

    def _number(self, field: str, value: object) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if math.isfinite(number):
                return number
        self._refuse(field, value, "alpha is a finite number")
        return 1.0

    def _flag(self, field: str) -> bool:
        value = self._config.get(field)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._refuse(field, value, "it is true or false")
        return False

    def _table(self, field: str) -> list[tuple[str, object]]:
        value = self._config.get(field)
        if value is None:
            return []
        if isinstance(value, dict):
            return list(value.items())
        self._refuse(field, value, "it is an object from module patterns to numbers")
        return []

    def _targets(self) -> str | tuple[str, ...]:
        if is_off(self._config.get("target_modules")):
            self._refuse(
                "target_modules",
                self._config.get("target_modules"),
                "it is empty; list the modules the adapter was trained on, for example "
                '["q_proj", "k_proj", "v_proj", "o_proj"]',
            )
            return ()
        return self._names_or_regex("target_modules")

    def _names_or_regex(self, field: str) -> str | tuple[str, ...]:
        value = self._config.get(field)
        if is_off(value):
            return ()
        if isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            # PEFT keeps a set and saves it in any order; sorting makes equal configs equal.
            return tuple(sorted(set(value)))
        self._refuse(field, value, "it is a list of module names or one regular expression")
        return ()

    def _layers(self) -> tuple[int, ...] | None:
        field = "layers_to_transform"
        value = self._config.get(field)
        if value is None:
            return None
        layers = value if isinstance(value, list) else [value]
        if any(isinstance(layer, bool) or not isinstance(layer, int) or layer < 0 for layer in layers):
            self._refuse(field, value, "it is a layer index or a list of them")
            return None
        return tuple(sorted(set(layers))) or None

    def _layers_pattern(self) -> tuple[str, ...]:
        value = self._config.get("layers_pattern")
        if is_off(value):
            return ()
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return tuple(value)
        self._refuse("layers_pattern", value, "it is the name of the layer list, or a list of such names")
        return ()

    def _check_layer_choice(self, settings: LoraSettings) -> None:
        """Refuse the combinations that PEFT itself refuses to load."""
        if isinstance(settings.target_modules, str):
            for field in ("layers_to_transform", "layers_pattern"):
                if not is_off(self._config.get(field)):
                    fix = "PEFT allows it only when target_modules is a list; put the layers into the regex"
                    self._refuse(field, self._config[field], fix)
        elif settings.layers_pattern and settings.layers_to_transform is None:
            self._refuse(
                "layers_pattern", self._config["layers_pattern"], "it needs layers_to_transform beside it"
            )


def _refusal(field: str, value: object, fix: str) -> AdapterFormatError:
    return AdapterFormatError(
        f"{CONFIG_FILE}: {shorten(field, max_chars=_SHOWN_CHARS)} = {show(value)}: {fix}", field=field
    )


def _unique_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = max(counts, key=counts.__getitem__)
        raise ValueError(
            f"the key {shorten(twice, max_chars=_SHOWN_CHARS)!r} appears twice; keep one of them"
        )
    return unique


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
