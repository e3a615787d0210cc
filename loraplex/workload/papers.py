"""The papers' workloads by name, as recipes.

`NAMED` lists them, each with its experiment and its differences from it; `paper_workload` makes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from loraplex.core.words import unknown_name
from loraplex.workload.build import make_workload
from loraplex.workload.mix import parse_mix
from loraplex.workload.paper_parts import (
    Part,
    alpaca_lengths,
    azure_lengths,
    lmsys_lengths,
    maf_calls,
    maf_functions,
    maf_popularity,
    servegen_clients,
    sharegpt_lengths,
)
from loraplex.workload.recipe import ArrivalKind, MadeFrom, PopularityKind, Recipe, RecipeError
from loraplex.workload.request import Workload

_FOUR_RANKS: Final = "8,16,32,64"
_FIVE_RANKS: Final = "8,16,32,64,128"
_SCALED: Final = {128: (1.5, 1.58), 256: (3.6, 1.36), 512: (7.7, 1.24)}
"""Toppings' servers by number of adapters: requests/s, and the exponent of the Zipf law closest to MAF's
curve."""

_MAF_CURVE: Final = (
    "Poisson arrivals without MAF's bursts; popularity read off the curve of 1,000 functions, without data a "
    "Zipf law of 0.93, whose busiest adapter has 6% and not 0.3%"
)
_AZURE: Final = "Azure's lengths of 2023, not 2024, cut at 3,072 and 1,024 tokens; log-normal without data"
_LMSYS: Final = "prompts of LMSYS are log-normal (its outputs, too, without data)"
_ALPACA: Final = "Alpaca's lengths are log-normal with its means"
_SHAREGPT: Final = "ShareGPT's lengths are log-normal with the means of its single turns"


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedRecipe:
    """A paper's workload. `base` has the paper's rate, duration and adapters; `parts` add published data.

    `fixed`: options that cannot be changed, and why.
    """

    name: str
    paper: str
    what: str
    differs: str
    base: Recipe
    parts: tuple[Part, ...] = ()
    fixed: Mapping[str, str] = field(default_factory=dict)

    def recipe(
        self,
        *,
        data: Path | None = None,
        rate: float | None = None,
        duration_s: float | None = None,
        seed: int = 0,
        num_adapters: int | None = None,
    ) -> Recipe:
        """Return the recipe; None keeps the paper's value of an option. `data`: folder of published files.

        Raises RecipeError for fixed options, and for a folder that lacks a file or has no effect.
        """
        self._check(rate, num_adapters)
        found = replace(
            self.base,
            paper=self.name,
            seed=seed,
            rate=self.base.rate if rate is None else rate,
            duration_s=self.base.duration_s if duration_s is None else duration_s,
            num_adapters=self.base.num_adapters if num_adapters is None else num_adapters,
        )
        for part in self.parts:
            found = part(found, data)
        if data is not None and not found.files:
            raise RecipeError("data", f"has no effect: {self.name} reads none of the published files")
        return replace(found, made_from=MadeFrom.PUBLISHED if found.files else MadeFrom.STAND_INS)

    def _check(self, rate: float | None, num_adapters: int | None) -> None:
        for option, value in (("rate", rate), ("num_adapters", num_adapters)):
            if value is not None and option in self.fixed:
                raise RecipeError(option, f"is fixed in {self.name}: {self.fixed[option]}")
        assert self.base.ranks is not None
        num_ranks = len(parse_mix(self.base.ranks, least=1, whole=True).values)
        if num_adapters is not None and 0 < num_adapters < num_ranks:
            raise RecipeError(
                "num_adapters", f"{self.name} has {num_ranks} ranks ({self.base.ranks}); give as many or more"
            )


def paper_workload(
    name: str,
    *,
    data: Path | None = None,
    rate: float | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    num_adapters: int | None = None,
) -> Workload:
    """Make the workload of this name; see `NamedRecipe.recipe`."""
    named = find_paper(name)
    return make_workload(
        named.recipe(data=data, rate=rate, duration_s=duration_s, seed=seed, num_adapters=num_adapters)
    )


def find_paper(name: str) -> NamedRecipe:
    """Return the workload of this name; RecipeError suggests similar names."""
    if name not in NAMED:
        raise RecipeError("paper", unknown_name("workload of a paper", name, NAMED))
    return NAMED[name]


def _scaled_production(recipe: Recipe, data: Path | None) -> Recipe:
    """Set rate and skew, which in the paper depend on the number of adapters."""
    assert recipe.num_adapters is not None
    if recipe.num_adapters not in _SCALED:
        raise RecipeError("num_adapters", f"the paper has {', '.join(map(str, _SCALED))} adapters")
    rate, skew = _SCALED[recipe.num_adapters]
    return maf_popularity(skew)(replace(recipe, rate=recipe.rate or rate), data)


def _of_40_000(name: str, paper: str, lengths: Part, whose_lengths: str) -> NamedRecipe:
    return NamedRecipe(
        name=name,
        paper=paper,
        what="simulation of 60 servers: 40,000 adapters of ranks 8 to 64 as popular as MAF's functions, "
        "340 requests/s for 5 minutes",
        differs=f"{_MAF_CURVE}; {whose_lengths}",
        base=Recipe(rate=340, duration_s=300, num_adapters=40_000, ranks=_FOUR_RANKS),
        parts=(maf_popularity(0.93), lengths),
        fixed={"num_adapters": "there are 40,000"},
    )


def _toppings() -> list[NamedRecipe]:
    return [
        _of_40_000("toppings-60-servers", "Toppings", lmsys_lengths, _LMSYS),
        NamedRecipe(
            name="toppings-8-servers",
            paper="Toppings",
            what="testbed of 8 servers: ranks 8 to 64, Poisson arrivals at 40 requests/s (30, 40, 50 there)",
            differs="200 adapters in turn, as in the paper's other Poisson workloads: it does not say how "
            f"many and how popular they are here; {_LMSYS}",
            base=Recipe(
                rate=40,
                duration_s=300,
                num_adapters=200,
                ranks=_FOUR_RANKS,
                popularity=PopularityKind.IN_TURN,
            ),
            parts=(lmsys_lengths,),
        ),
        NamedRecipe(
            name="toppings-scaled-production",
            paper="Toppings",
            what="one server: 512 adapters of rank 64 as popular as MAF's functions at 7.7 requests/s "
            "(256 at 3.6, 128 at 1.5)",
            differs=f"Poisson arrivals; without data, popularity by a Zipf law; {_LMSYS}",
            base=Recipe(duration_s=300, num_adapters=512, ranks="64"),
            parts=(_scaled_production, lmsys_lengths),
        ),
        NamedRecipe(
            name="toppings-synthetic",
            paper="Toppings",
            what="one server: every request on another of 200 adapters of rank 64, at 9 requests/s",
            differs=_LMSYS,
            base=Recipe(
                rate=9, duration_s=300, num_adapters=200, ranks="64", popularity=PopularityKind.IN_TURN
            ),
            parts=(lmsys_lengths,),
            fixed={"num_adapters": "there are 200"},
        ),
    ]


def _caraserve() -> list[NamedRecipe]:
    return [
        _of_40_000("caraserve-60-servers", "CaraServe", alpaca_lengths, _ALPACA),
        NamedRecipe(
            name="caraserve-8-servers",
            paper="CaraServe",
            what="testbed of 8 servers: about 1,200 requests sampled from MAF at 60 requests/s (20 s), "
            "ranks 8 to 64",
            differs=f"{_MAF_CURVE}; {_ALPACA}",
            base=Recipe(rate=60, duration_s=20, num_adapters=40_000, ranks=_FOUR_RANKS),
            parts=(maf_popularity(0.93), alpaca_lengths),
            fixed={"num_adapters": "there are 40,000"},
        ),
    ]


def _loraserve() -> list[NamedRecipe]:
    uniform, shifting = PopularityKind.UNIFORM, PopularityKind.SHIFTING
    by_rank = PopularityKind.EXPONENTIAL_BY_RANK
    even, half = "equally popular", "half of the traffic moving from rank 128 to rank 8"
    small = "small ranks exponentially more popular"
    time = "over 10 minutes: the paper does not say how long the shift takes; "
    factor = "by a factor of e from rank to rank: the paper has no figure; "
    return [
        *(
            _loraserve_trace(arrivals, name, kind, words, chosen + _AZURE)
            for arrivals in (ArrivalKind.REGULAR, ArrivalKind.POISSON)
            for name, kind, words, chosen in (
                ("uniform", uniform, even, ""),
                ("shifting", shifting, half, time),
                ("exponential", by_rank, small, factor),
            )
        ),
        _loraserve_skew("loraserve-rank-skew-mild", 1 / 3, "1/3"),
        _loraserve_skew("loraserve-rank-skew", 1.0, "1"),
        _loraserve_skew("loraserve-rank-skew-strong", 3.0, "3"),
        NamedRecipe(
            name="loraserve-production",
            paper="LoRAServe",
            what="4 servers: five adapters of ranks 8 to 128 split into 100 (50, 200) by a power law within "
            "each rank, 30 requests/s",
            differs="its trace is not public: Poisson arrivals without drift, the five ranks equally "
            f"popular; {_AZURE}",
            base=Recipe(
                rate=30,
                duration_s=600,
                num_adapters=100,
                ranks=_FIVE_RANKS,
                popularity=PopularityKind.ZIPF_WITHIN_RANK,
                skew=1.0,
            ),
            parts=(azure_lengths,),
        ),
    ]


def _loraserve_trace(
    arrivals: ArrivalKind, name: str, popularity: PopularityKind, words: str, differs: str
) -> NamedRecipe:
    return NamedRecipe(
        name=f"loraserve-{arrivals}-{name}",
        paper="LoRAServe",
        what=f"4 servers: {arrivals} arrivals at 32 requests/s, 25 adapters of ranks 8 to 128, {words} "
        "(8 servers: 64 for 50, 12: 96 for 75)",
        differs=differs,
        base=Recipe(
            rate=32,
            duration_s=600,
            num_adapters=25,
            ranks=_FIVE_RANKS,
            arrivals=arrivals,
            popularity=popularity,
        ),
        parts=(azure_lengths,),
    )


def _loraserve_skew(name: str, alpha: float, words: str) -> NamedRecipe:
    return NamedRecipe(
        name=name,
        paper="LoRAServe",
        what=f"4 servers: 100 adapters, the x-th smallest of five ranks x^-{words} as popular, 36 requests/s",
        differs=_AZURE,
        base=Recipe(
            rate=36,
            duration_s=600,
            num_adapters=100,
            ranks=_FIVE_RANKS,
            popularity=PopularityKind.POWER_BY_RANK,
            skew=alpha,
        ),
        parts=(azure_lengths,),
        fixed={"num_adapters": "there are 100"},
    )


def _dlora() -> list[NamedRecipe]:
    differs = (
        "MAF of 2019, not 2021, an hour from noon, Poisson within each minute; without data adapters by a "
        f"Zipf law, each with gamma gaps of CV 4; {_SHAREGPT}"
    )
    return [
        NamedRecipe(
            name="dlora-bursty",
            paper="dLoRA",
            what="8 replicas: 32 adapters of rank 8 with MAF's bursts, 16 requests/s (8 to 32 there)",
            differs=f"functions to adapters in turn: the paper does not give this skewness; {differs}",
            base=Recipe(rate=16, duration_s=3600, num_adapters=32, ranks="8"),
            parts=(maf_functions(1, skew=0.7), sharegpt_lengths),
        ),
        NamedRecipe(
            name="dlora-skewed",
            paper="dLoRA",
            what="skewness 10: ten of MAF's functions at a time to each of 32 adapters of rank 8, "
            "8 requests/s",
            differs=differs,
            base=Recipe(rate=8, duration_s=3600, num_adapters=32, ranks="8"),
            parts=(maf_functions(10, skew=1.35), sharegpt_lengths),
        ),
    ]


def _adapter_twin() -> list[NamedRecipe]:
    return [
        NamedRecipe(
            name="adapter-twin-predictable",
            paper="adapter twin",
            what="one server: 96 adapters of ranks 8 to 32 at 1.6, 0.8 or 0.4 requests/s each, for an hour",
            differs=_SHAREGPT,
            base=Recipe(rates="1.6,0.8,0.4", duration_s=3600, num_adapters=96, ranks="8,16,32"),
            parts=(sharegpt_lengths,),
            fixed={"rate": "every adapter has 1.6, 0.8 or 0.4 requests/s"},
        ),
        NamedRecipe(
            name="adapter-twin-unpredictable",
            paper="adapter twin",
            what="one server: 128 adapters of rank 8 that begin at 0.1, 0.05 or 0.025 requests/s each, which "
            "doubles or halves every 5 minutes",
            differs="log-normal gaps have a CV of 2, and rates stay between half of the lowest and twice the "
            f"highest of the first ones: the paper has no figures; {_SHAREGPT}",
            base=Recipe(
                rates="0.1,0.05,0.025", change_every_s=300, duration_s=3600, num_adapters=128, ranks="8"
            ),
            parts=(sharegpt_lengths,),
            fixed={"rate": "every adapter begins with 0.1, 0.05 or 0.025 requests/s"},
        ),
    ]


def _traces() -> list[NamedRecipe]:
    return [
        NamedRecipe(
            name="maf",
            paper="MAF 2019",
            what="Azure Functions: 1,000 functions as adapters, 50 requests/s for an hour",
            differs="ranks 8 to 64 and LMSYS lengths, as functions have none; calls scaled down, Poisson "
            "within their minute; without data a Zipf law of 1.15 and gamma gaps of CV 1.1, no bursts of "
            "single adapters",
            base=Recipe(rate=50, duration_s=3600, num_adapters=1_000, ranks=_FOUR_RANKS),
            parts=(maf_calls, lmsys_lengths),
        ),
        NamedRecipe(
            name="servegen",
            paper="ServeGen",
            what="Alibaba's m-mid: 108 clients as adapters, 50 requests/s for an hour",
            differs="ranks 8 to 64, as clients have none; rates scaled down, lengths of any client, cut at "
            "3,072 and 1,024 tokens; without data a Zipf law of 1.2, gamma gaps of CV 1.3, log-normal "
            "lengths, no drift",
            base=Recipe(rate=50, duration_s=3600, num_adapters=108, ranks=_FOUR_RANKS),
            parts=(servegen_clients,),
        ),
    ]


NAMED: Final[Mapping[str, NamedRecipe]] = {
    each.name: each
    for each in (*_toppings(), *_caraserve(), *_loraserve(), *_dlora(), *_adapter_twin(), *_traces())
}
