"""The benchmark of a fleet in front of vLLM, and its counts for comparison."""

from __future__ import annotations

from benchmarks.fleet_vllm import COUNTED_FROM_S, Traffic, loads_if_packed
from benchmarks.live_tables import vllm_table
from loraplex.bench.client import encode_request


def traffic_of(models: str, *, first_s: float) -> Traffic:
    requests = [encode_request(model=model, prompt_token_ids=[1], output_tokens=1) for model in models]
    return Traffic(requests=requests, arrivals_s=[first_s + number for number in range(len(models))])


def test_popular_adapters_keep_their_slots_and_the_others_share_the_last_server() -> None:
    popular, others = "abcdefgh" * 4, "ijklm"
    # Each of the popular ones is loaded once; five take turns in four slots, so that each is loaded anew.
    assert loads_if_packed(traffic_of(popular + others * 2, first_s=COUNTED_FROM_S)) == 8 + 10
    assert loads_if_packed(traffic_of(popular + others[:4] * 2, first_s=COUNTED_FROM_S)) == 8 + 4
    assert loads_if_packed(traffic_of(popular, first_s=0.0)) == 0, "what comes early does not count"


def test_the_table_has_the_ratios_and_the_loads_of_known_popularity() -> None:
    before = {"requests": 9, "failed": 0, "adapter_loads": 8, "ttft_mean_ms": 100.0, "ttft_p95_ms": 200.0}
    result = {
        "routings": {"round-robin": before, "auto": before | {"adapter_loads": 4}},
        "loads_if_packed": 2,
    }
    text = vllm_table(result)
    assert "| `auto` over `round-robin` | 0.50x | 1.00x |  |" in text
    assert "| 2, 0.25x |" in text
