"""Parsing a server's /metrics page."""

from __future__ import annotations

import pytest

from loraplex.server.fleet.backend_metrics import BLOCK_TOKENS, parse_stats


@pytest.mark.parametrize(
    ("labels", "num_tokens"),
    [
        ('num_gpu_blocks="400"', 400 * BLOCK_TOKENS),  # loraplex
        ('block_size="16",num_gpu_blocks="400"', 400 * 16),  # vLLM on a GPU
        ('block_size="128",num_gpu_blocks="400"', 400 * 128),  # vLLM on a CPU
        ('block_size="None",num_gpu_blocks="None"', 0),
    ],
)
def test_kv_memory_is_read_in_the_blocks_that_the_server_has(labels: str, num_tokens: int) -> None:
    page = (
        f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{labels}}} 1.0\n"
        '# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    )
    stats = parse_stats(page, {})
    assert stats.num_kv_blocks * BLOCK_TOKENS == num_tokens
    assert stats.num_kv_blocks_used * 2 == stats.num_kv_blocks
