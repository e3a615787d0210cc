"""Paged KV memory and the prefix cache."""

from __future__ import annotations

import pytest

from loraplex.scheduling.blocks import BlockPool

TOKENS = list(range(100, 112))


def published(pool: BlockPool, tokens: list[int], adapter: str | None = None, salt: str = "") -> list[int]:
    """Blocks of a sequence that has computed all its tokens and ended."""
    blocks = pool.allocate(pool.blocks_for(len(tokens)))
    assert blocks is not None
    pool.publish(adapter, tokens, blocks, 0, len(tokens) // pool.block_size, salt)
    pool.release(blocks)
    return blocks


def test_allocate_gives_none_and_changes_nothing_when_short() -> None:
    pool = BlockPool(3, 4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    pool.check_integrity([])


def test_a_published_prefix_is_found_block_by_block() -> None:
    pool = BlockPool(8, 4)
    blocks = published(pool, TOKENS)
    assert pool.match(None, [*TOKENS, 7]) == blocks
    assert pool.match(None, [*TOKENS[:8], 0, 0, 0, 0, 0]) == blocks[:2]
    assert pool.match(None, [0, *TOKENS]) == []


def test_at_least_one_token_is_left_to_compute() -> None:
    pool = BlockPool(8, 4)
    blocks = published(pool, TOKENS)
    assert pool.match(None, TOKENS) == blocks[:2]
    assert pool.match(None, TOKENS[:1]) == []


def test_adapters_never_share_blocks() -> None:
    pool = BlockPool(8, 4)
    published(pool, TOKENS, "a")
    assert pool.match("b", [*TOKENS, 7]) == []
    assert pool.match(None, [*TOKENS, 7]) == []
    assert len(pool.match("a", [*TOKENS, 7])) == 3


@pytest.mark.parametrize("adapter", [None, "a"])
def test_salts_never_share_blocks(adapter: str | None) -> None:
    pool = BlockPool(12, 4)
    for salt, others in (("acme", ("", "globex")), ("", ("acme", "globex"))):
        blocks = published(pool, TOKENS, adapter, salt)
        assert pool.match(adapter, [*TOKENS, 7], salt) == blocks
        assert pool.match(adapter, [*TOKENS, 7], others[1]) == []
        pool.check_integrity([])
    pool = BlockPool(8, 4)
    published(pool, TOKENS, adapter, "acme")
    assert pool.match(adapter, [*TOKENS, 7]) == []
    if adapter is not None:
        pool.forget_adapter(adapter)
        assert pool.match(adapter, [*TOKENS, 7], "acme") == []


def test_a_forgotten_adapter_finds_nothing() -> None:
    pool = BlockPool(8, 4)
    published(pool, TOKENS, "a")
    pool.forget_adapter("a")
    assert pool.match("a", [*TOKENS, 7]) == []


def test_the_same_tokens_behind_another_prefix_are_not_mistaken() -> None:
    pool = BlockPool(8, 2)
    published(pool, [1, 2, 3, 4])
    published(pool, [5, 6, 3, 4])
    assert len(pool.match(None, [9, 9, 3, 4, 0])) == 0
    assert pool.match(None, [1, 2, 3, 4, 0])[1] != pool.match(None, [5, 6, 3, 4, 0])[1]


def test_the_least_recently_released_contents_go_first() -> None:
    pool = BlockPool(4, 4)
    old = published(pool, [1, 2, 3, 4])
    young = published(pool, [5, 6, 7, 8])
    taken = pool.allocate(3)
    assert taken is not None
    assert old[0] in taken
    assert young[0] not in taken
    assert pool.match(None, [1, 2, 3, 4, 0]) == []
    assert pool.match(None, [5, 6, 7, 8, 0]) == young


def test_shared_blocks_are_not_free_until_the_last_release() -> None:
    pool = BlockPool(4, 4)
    blocks = published(pool, TOKENS)
    pool.share(blocks)
    pool.share(blocks)
    pool.check_integrity([blocks, blocks])
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 4
    pool.check_integrity([])


def test_the_end_of_a_sequence_is_reused_before_its_start() -> None:
    pool = BlockPool(3, 4)
    blocks = published(pool, TOKENS)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.match(None, [*TOKENS, 7]) == blocks[:2]


def test_publishing_the_same_contents_twice_keeps_the_first() -> None:
    pool = BlockPool(8, 4)
    first = published(pool, TOKENS)
    other = pool.allocate(5)
    assert other is not None
    pool.publish(None, TOKENS, other[:3], 0, 3)
    pool.release(other)
    assert pool.match(None, [*TOKENS, 7]) == first
    pool.check_integrity([])


def test_releasing_twice_is_a_bug_that_is_caught() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_what_was_shared_outlives_a_stream_of_prompts_that_nobody_repeats() -> None:
    pool = BlockPool(8, 4)
    prefix = published(pool, TOKENS[:4])
    pool.share(prefix)
    pool.release(prefix)
    for start in range(20):
        published(pool, [start * 100 + n for n in range(8)])
        pool.check_integrity([])
    assert pool.match(None, [*TOKENS[:4], 7]) == prefix


def test_while_there_are_few_of_them_prompts_are_kept_by_age_alone() -> None:
    pool = BlockPool(8, 4)
    shared = published(pool, TOKENS[:4])
    pool.share(shared)
    pool.release(shared)
    young = published(pool, [1, 2, 3, 4])
    assert pool.allocate(7) is not None
    assert pool.match(None, [*TOKENS[:4], 7]) == []
    assert pool.match(None, [1, 2, 3, 4, 5]) == young
