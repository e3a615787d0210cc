"""Makes a workload from a recipe with a trace."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from loraplex.core.arrays import IntArray
from loraplex.workload.build_parts import lengths_of, popularity_of, ranks_of, speed_for
from loraplex.workload.counted import CountedTrace, CountedTraffic
from loraplex.workload.counted_files import read_maf, read_servegen
from loraplex.workload.made import End, MadeWorkload, ReplayedWorkload
from loraplex.workload.recipe import DEFAULT_NUM_ADAPTERS, Recipe, RecipeError, Source
from loraplex.workload.replay import Rows, read_azure, read_vtc
from loraplex.workload.request import WorkloadHeader
from loraplex.workload.streams import Purpose, stream

_READERS: Final = {Source.MAF: read_maf, Source.SERVEGEN: read_servegen}


def replayed_workload(recipe: Recipe) -> ReplayedWorkload:
    """Make a workload of an Azure or VTC trace. The file is read for header and speed, and again when
    replayed."""
    assert recipe.trace is not None, "checked by the recipe"
    is_azure = recipe.source is Source.AZURE
    rows: Rows = partial(read_azure if is_azure else read_vtc, recipe.trace)
    start_s = recipe.start_s or 0.0
    speed, last_s = speed_for(
        recipe.rate, lambda: (row.arrival_s - start_s for row in rows() if row.arrival_s >= start_s)
    )
    duration_s = recipe.duration_s
    if duration_s is None and recipe.num_requests is None:
        duration_s = round(last_s / speed, 6) or None
    num_adapters = recipe.num_adapters or (DEFAULT_NUM_ADAPTERS if is_azure else _num_adapters(rows))
    ranks = ranks_of(recipe, num_adapters)
    return ReplayedWorkload(
        header=WorkloadHeader(ranks=ranks, duration_s=duration_s, recipe=recipe.given()),
        path=recipe.trace,
        rows=rows,
        popularity=popularity_of(recipe, ranks) if is_azure else None,
        # The last request of a trace is exactly at its end, and belongs to it.
        end=End(duration_s=recipe.duration_s, num_requests=recipe.num_requests),
        seed=recipe.seed,
        start_s=start_s,
        speed=speed,
        max_prompt_tokens=recipe.max_prompt_tokens,
        max_output_tokens=recipe.max_output_tokens,
    )


def _num_adapters(rows: Rows) -> int:
    return 1 + max(row.adapter or 0 for row in rows())


def counted_workload(recipe: Recipe) -> MadeWorkload:
    """Make a workload of a MAF or ServeGen trace."""
    assert recipe.trace is not None, "checked by the recipe"
    assert recipe.source is not None
    whole = _READERS[recipe.source](recipe.trace)
    start_s = recipe.start_s or 0.0
    end_s = whole.end_s if recipe.duration_s is None else min(start_s + recipe.duration_s, whole.end_s)
    if start_s >= end_s:
        raise RecipeError("start_s", f"is not before the end of the trace, {whole.end_s:g} s")
    trace, adapters, names = _adapters(recipe, whole)
    mean_rate = trace.mean_rate(start_s, end_s)
    if mean_rate <= 0:
        raise RecipeError("start_s", "these sources made no request in that time")
    cut_short = recipe.num_requests is not None and recipe.duration_s is None
    return MadeWorkload(
        header=WorkloadHeader(
            ranks=ranks_of(recipe, recipe.num_adapters or len(whole.names)),
            names=names,
            duration_s=None if cut_short else end_s - start_s,
            recipe=recipe.given(),
        ),
        traffic=CountedTraffic(
            trace=trace,
            adapters=adapters,
            start_s=start_s,
            scale=1.0 if recipe.rate is None else recipe.rate / mean_rate,
        ),
        lengths=lengths_of(recipe),
        end=End(duration_s=end_s - start_s, num_requests=recipe.num_requests),
        seed=recipe.seed,
    )


def _adapters(recipe: Recipe, trace: CountedTrace) -> tuple[CountedTrace, IntArray, tuple[str, ...] | None]:
    """Return the sources used, the adapter of each, and the adapters' names if these are the sources'."""
    num_sources, wanted = len(trace.names), recipe.num_adapters
    if wanted is None:
        return trace, np.arange(num_sources), trace.names
    if wanted > num_sources:
        raise RecipeError(
            "num_adapters", f"the trace has {num_sources} sources; for more, draw them with popularity trace"
        )
    if (group := recipe.functions_per_adapter) is not None:
        # dLoRA's skewness: this many of the busiest functions go to the first adapter, as many of the next to
        # the second, and so on in turn.
        place = np.empty(num_sources, dtype=np.int64)
        place[np.argsort(-trace.totals(), kind="stable")] = np.arange(num_sources)
        return trace, place // group % wanted, None
    chosen = np.sort(stream(recipe.seed, Purpose.SOURCES).choice(num_sources, wanted, replace=False))
    part = trace.part(chosen)
    return part, np.arange(wanted), part.names
