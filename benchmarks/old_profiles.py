"""Profiles of version 1 among the committed results, as cost models: tables show them until they are measured
again. `loraplex` itself refuses them."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.markdown import Result

_READERS: Final = 12
"""Threads that read adapters in an engine."""


def as_version_2(profile: Result) -> dict[str, Any]:
    """The same predictions. Mean errors of fits were not kept: they are 0 here, and not shown."""
    if profile.get("version") != 1:
        return dict(profile)
    line = [each["line"] for each in profile["read"] if each["readers"] <= _READERS][-1]
    old = profile["step"]
    curve, terms = old["curve"], dict(old["terms"])
    prompt_s, request_s = terms.pop("prompt_s"), terms.pop("request_s")
    step = {
        "decodes": {
            "rows": curve["rows"],
            "seconds_at": [
                each + rows * request_s for rows, each in zip(curve["rows"], curve["seconds_at"], strict=True)
            ],
            "stepped": False,
        },
        "prompts": {
            "rows": curve["rows"],
            "seconds_at": [each + prompt_s for each in curve["seconds_at"]],
            "stepped": False,
        },
        "terms": terms | {"prompt_s": request_s, "beside_prompts_s": request_s, "prompt_lora_s": 0.0},
        "quality": _quality(old["quality"]),
    }
    bus = profile["bus"]
    return {
        **{name: _line(each) if name == "disk" else each for name, each in profile.items()},
        "version": 2,
        "read": _line(line),
        "step": step,
        "assist": profile["assist"] | {"quality": _quality(profile["assist"]["quality"])},
        "bus": None if bus is None else bus | {"copy": _line(bus["copy"])},
        "corrections": {name: profile["corrections"][name] for name in ("copy", "step")},
        "held_out": None,
        "memory": None,
    }


def _line(line: Result) -> dict[str, Any]:
    return line | {"quality": _quality(line["quality"])}


def _quality(quality: Result | None) -> dict[str, Any] | None:
    return None if quality is None else {"mean_error": 0.0, **quality}
