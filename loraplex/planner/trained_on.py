"""The runs that a dataset is of, and that a surrogate made from it knows about."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from loraplex.perf.profile_json import JsonObject


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedOn:
    """`profile`: the name it was given by. `profile_sha256`: a hash of its content. `prompt_tokens`,
    `output_tokens`: mean of the requests. `lengths`: a name of `LengthsOf`. `duration_s`: simulated seconds
    of each run."""

    profile: str
    profile_sha256: str
    model: str
    hardware: str
    lengths: str
    prompt_tokens: float
    output_tokens: float
    duration_s: float

    @property
    def request_tokens(self) -> float:
        """Mean tokens of a request, prompt and answer."""
        return self.prompt_tokens + self.output_tokens

    def as_json(self) -> dict[str, str | float]:
        return asdict(self)

    @classmethod
    def of_json(cls, value: object) -> TrainedOn:
        """Invert `as_json`. Raises ValueError that says what is wrong."""
        found = JsonObject(value, "trained_on")
        texts = {each.name: found.text(each.name) for each in fields(cls) if each.type == "str"}
        numbers = {each.name: found.number(each.name) for each in fields(cls) if each.type == "float"}
        found.end()
        return cls(**texts, **numbers)  # type: ignore[arg-type]
