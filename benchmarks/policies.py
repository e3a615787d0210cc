"""Other victims, queues, admission and start policies than the shipped ones, in the twin of one GPU.

    python -m benchmarks.policies --data FOLDER                 all workloads, some minutes
    python -m benchmarks.policies zipf-100 conversations-100    these; the others keep their figures

Writes results/policies.json. Each workload is drawn for three seeds and run by the engine's own scheduler on
a virtual clock, with the costs of the profile `h200-llama-2-7b`: adapters of ranks 8 to 128 on all linears,
device memory for a third of them beside KV blocks, host memory for half of them, files on disk. The load is
70 to 80% of what the engine can do; 50% of Azure's requests for code, whose bursts far exceed it. One
workload has a slow bus, where start policies differ most. The candidates are in `policy_victims`,
`policy_queues` and `policy_starts`; those that go by the lengths of answers know them exactly, which no
engine does.

Two sections hold a rule against the one before it, by other seeds than those that it was found with:
`admission-by-load`, conversations at several loads, and `victims-by-seed`, every workload.

`--data` is the folder of published traces (docs/workloads.md). Without it, workloads made from them are left
out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks import policy_queues as queues
from benchmarks import policy_starts as starts
from benchmarks import policy_victims as victims
from benchmarks.policy_loads import DURATION_S, LOADS, Load
from benchmarks.policy_twin import SLO, Candidate, run
from benchmarks.sources import fingerprints
from loraplex.bench.environment import environment
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile

RESULTS: Final = Path(__file__).parent / "results"
FILE: Final = "policies.json"
PROFILE: Final = "h200-llama-2-7b"
SEEDS: Final = (0, 1, 2)
OVERLOAD: Final = 2.5
"""Times its rate, a workload shows what the engine can do."""

SHIPPED: Final = Candidate(name="as shipped", kind="")
CANDIDATES: Final = (
    SHIPPED,
    Candidate(name="LRU, as before", kind="victims", victims=victims.lru),
    Candidate(name="LFU with aging", kind="victims", victims=victims.lfu),
    Candidate(name="GDSF over adapters and blocks", kind="victims", victims=victims.gdsf),
    Candidate(name="adapters with a host copy first", kind="victims", victims=victims.staged_first),
    Candidate(
        name="blocks of absent adapters first",
        kind="victims",
        victims=victims.absent_first,
        needs_blocks=True,
    ),
    Candidate(
        name="the same, adapters with blocks last", kind="victims", victims=victims.backed, needs_blocks=True
    ),
    Candidate(name="Chameleon's size classes", kind="queue", queue=queues.SizeClasses),
    Candidate(name="smallest first with aging", kind="queue", queue=queues.ShortestRequest),
    Candidate(name="resident adapters first", kind="queue", queue=queues.ResidentFirst),
    Candidate(name="memory for the first chunk, as before", kind="admission", admission=queues.FirstChunk()),
    Candidate(name="room to grow by a block as well", kind="admission", admission=queues.RoomToGrow()),
    Candidate(name="memory for the whole answer as well", kind="admission", admission=queues.WholeAnswer()),
    Candidate(name="always join, as `pipelined`", kind="start policy", starts=starts.always),
    Candidate(name="never join, as `overlap`", kind="start policy", starts=starts.never),
    Candidate(name="no delay of decodes", kind="start policy", starts=starts.by(starts.NoDecodeStall)),
    Candidate(name="steps a fifth longer", kind="start policy", starts=starts.by(starts.LongDecodeStall)),
    Candidate(
        name="own wait against delays, decodes by 0.1",
        kind="start policy",
        starts=starts.by(starts.GainAgainstDelays),
    ),
    Candidate(
        name="own wait against delays, decodes by 1",
        kind="start policy",
        starts=starts.by(starts.HeavyDecodes),
    ),
    Candidate(name="shortest load first", kind="start policy", queue=starts.ShortestLoad),
)


BY_LOAD: Final = "admission-by-load"
_CONVERSATIONS: Final = LOADS[-1]
_CONVERSATIONS_SHARE: Final = 0.8
"""The share of capacity that the workload's own rate is."""
_SHARES: Final = (0.7, 0.8, 0.9)
_OTHER_SEEDS: Final = (10, 11, 12, 13, 14)
_FORMER: Final = next(each for each in CANDIDATES if isinstance(each.admission, queues.FirstChunk))

BY_SEED: Final = "victims-by-seed"
_NEW_SEEDS: Final = tuple(range(20, 30))
_LRU: Final = next(each for each in CANDIDATES if each.victims is victims.lru)


def measure(profile: CostModel, load: Load, data: Path | None) -> dict[str, Any]:
    """Return the section of one workload."""
    drawn = [load.draw(seed, 1.0, data) for seed in SEEDS]
    has_blocks = drawn[0].prompts is not None
    most = run(profile, load, load.draw(SEEDS[0], OVERLOAD, data), SHIPPED)["output_tok_s"]
    offered = [sum(each.output_tokens for each in one.requests) / DURATION_S for one in drawn]
    policies = {}
    for candidate in CANDIDATES:
        if candidate.needs_blocks and not has_blocks:
            continue
        figures = [run(profile, load, each, candidate) for each in drawn]
        policies[candidate.name] = {"kind": candidate.kind, "figures": by_name(figures)}
        print(f"{load.name}: {candidate.name}", file=sys.stderr, flush=True)
    return {
        "what": load.what,
        "requests_per_s": fmean(len(each.requests) for each in drawn) / DURATION_S,
        "share_of_capacity": fmean(offered) / most,
        "capacity_tok_s": most,
        "slo": SLO.in_words(),
        "seeds": SEEDS,
        "policies": policies,
    }


def admission_by_load(profile: CostModel) -> dict[str, Any]:
    """Return the section that holds the shipped rule of admission against the one before it."""
    load, loads = _CONVERSATIONS, []
    for share in _SHARES:
        drawn = [load.draw(seed, share / _CONVERSATIONS_SHARE, None) for seed in _OTHER_SEEDS]
        former, shipped = (
            by_name([run(profile, load, each, candidate) for each in drawn])
            for candidate in (_FORMER, SHIPPED)
        )
        loads.append({"share_of_capacity": share, "former": former, "shipped": shipped})
        print(f"{BY_LOAD}: {share:.0%}", file=sys.stderr, flush=True)
    return {"workload": load.name, "seeds": _OTHER_SEEDS, "loads": loads}


def victims_by_seed(profile: CostModel, data: Path | None) -> dict[str, Any]:
    """Return the section that holds victims by their value, which are shipped, against LRU."""
    loads = {}
    for load in LOADS:
        if not load.is_here(data):
            raise SystemExit(f"{BY_SEED}: needs --data with {load.file}")
        drawn = [load.draw(seed, 1.0, data) for seed in _NEW_SEEDS]
        lru, by_value = (
            by_name([run(profile, load, each, candidate) for each in drawn]) for candidate in (_LRU, SHIPPED)
        )
        loads[load.name] = {"lru": lru, "by_value": by_value}
        print(f"{BY_SEED}: {load.name}", file=sys.stderr, flush=True)
    return {"seeds": _NEW_SEEDS, "loads": loads}


def by_name(runs: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Return each figure's mean and its value for every seed."""
    return {
        name: {
            "mean": round(fmean(each[name] for each in runs), 6),
            "runs": [round(each[name], 6) for each in runs],
        }
        for name in runs[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*(load.name for load in LOADS), BY_LOAD, BY_SEED]
    parser.add_argument("sections", nargs="*", default=names, help=", ".join(names))
    parser.add_argument("--data", type=Path, help="folder of published traces")
    parser.add_argument("--out", type=Path, default=RESULTS / FILE)
    args = parser.parse_args()
    if unknown := set(args.sections) - set(names):
        parser.error(f"no section {min(unknown)!r}; there are {', '.join(names)}")
    profile = find_profile(Path(PROFILE))
    assert isinstance(profile, CostModel)
    result = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {}

    def keep(name: str, figures: dict[str, Any]) -> None:
        about = environment(("loraplex", "numpy")) | {"sources": fingerprints(FILE), "profile": PROFILE}
        result[name] = about | figures
        in_order = {each: result[each] for each in names if each in result}
        args.out.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")

    for load in LOADS:
        if load.name in args.sections and load.is_here(args.data):
            keep(load.name, measure(profile, load, args.data))
        elif load.name in args.sections:
            print(f"{load.name}: left out, as it needs --data with {load.file}", file=sys.stderr)
    if BY_LOAD in args.sections:
        keep(BY_LOAD, admission_by_load(profile))
    if BY_SEED in args.sections:
        keep(BY_SEED, victims_by_seed(profile, args.data))


if __name__ == "__main__":
    main()
