"""Files of recorded runs, of an engine whose every cost is known: it was simulated."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

from loraplex.perf.serving_costs import SlotMemory
from loraplex.perf.slot_profile import ClientLimits, SlotProfile
from loraplex.twin.calibrate import START
from loraplex.twin.predict_run import predict_run
from loraplex.twin.recorded_runs import Measured, RunSetup
from loraplex.twin.run_workload import WorkloadBook

MODEL = "some-7b"
DURATION_S = 150.0
COLUMNS = (
    "experiment",
    "status",
    "model",
    "dataset",
    "num_adapters",
    "adapter_ranks",
    "max_loras_gpu_slots",
    "max_lora_rank",
    "max_num_seqs",
    "total_time_s",
    "rate_values",
    "rate_counts",
    "completed_requests",
    "dt_arrivals",
    "duration_s",
    "input_tok_s",
    "output_tok_s",
    "itl_mean_ms",
    "ttft_mean_ms",
    "mean_waiting",
    "kv_cache_tokens",
)
TRUTH = SlotProfile(
    model=MODEL,
    hardware="imagined",
    costs=replace(START, decode=replace(START.decode, base_s=16e-3, request_s=60e-6)),
    memory=SlotMemory(tokens=60_000, slot_tokens=50, slot_rank_tokens=10),
    client=ClientLimits(latency_s=30e-3, max_open=2000),
    max_running=900,
)


def setups() -> list[RunSetup]:
    return [
        RunSetup(
            key=f"{MODEL}/slots_{num_slots}_rate_{rate}_adapters_{count}",
            model=MODEL,
            ranks=(8, 16),
            num_slots=num_slots,
            max_rank=16,
            rates=((rate, count),),
            duration_s=DURATION_S,
            max_running=2048,
            dataset=None,
        )
        for rate, count in ((0.1, 16), (0.2, 16), (0.4, 16), (0.8, 16), (1.6, 16), (3.2, 32))
        for num_slots in (4, 8, 16)
    ]


def write_runs(path: Path, chosen: list[RunSetup]) -> None:
    """Write the true engine's results of these runs."""
    known = [(setup, _usual(setup)) for setup in chosen]
    book = WorkloadBook(known)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for setup in chosen:
            writer.writerow(_row(setup, book))


def _usual(setup: RunSetup) -> Measured:
    """Requests of 100 and 50 tokens, all of them served."""
    rps = setup.offered_rps
    return Measured(
        input_tok_s=100 * rps, output_tok_s=50 * rps, itl_s=1, ttft_s=1, completed_rps=rps, num_waiting=0.0
    )


def _row(setup: RunSetup, book: WorkloadBook) -> dict[str, object]:
    drawn = book.requests(setup)
    found = predict_run(TRUTH, book, setup, drawn)
    assert found is not None
    return {
        "experiment": setup.key,
        "status": "ok",
        "model": setup.model,
        "num_adapters": float(setup.num_adapters),
        "adapter_ranks": " ".join(map(str, setup.ranks)),
        "max_loras_gpu_slots": setup.num_slots,
        "max_lora_rank": setup.max_rank,
        "max_num_seqs": 2048,
        "total_time_s": DURATION_S,
        "rate_values": " ".join(str(rate) for rate, _ in setup.rates),
        "rate_counts": " ".join(str(count) for _, count in setup.rates),
        "completed_requests": round(found.output_tok_s / 50 * DURATION_S),
        "dt_arrivals": len(drawn[0].arrival_s),
        "duration_s": DURATION_S,
        "input_tok_s": found.input_tok_s,
        "output_tok_s": found.output_tok_s,
        "itl_mean_ms": found.itl_s * 1e3,
        "ttft_mean_ms": found.ttft_s * 1e3,
        "mean_waiting": found.mean_waiting,
        "kv_cache_tokens": TRUTH.memory.predict(num_slots=setup.num_slots, max_rank=setup.max_rank),
    }
