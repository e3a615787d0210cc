"""Adapters take the memory that the figures of a profile say."""

from __future__ import annotations

from cost_models import H200_MEMORY, MIB


def test_an_adapter_takes_its_ranks_and_a_table() -> None:
    qkv = ("q_proj", "k_proj", "v_proj")
    assert H200_MEMORY.adapter_bytes(64, qkv) == 96 * MIB + 32 * 7 * 6 * 8
    assert H200_MEMORY.adapter_bytes(64, ()) == H200_MEMORY.table_bytes
    assert H200_MEMORY.adapter_bytes(8, ["down_proj"]) > H200_MEMORY.adapter_bytes(8, ["q_proj"])
