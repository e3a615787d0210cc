"""Many steps at once, where all that happens in each is that every running request decodes.

On a virtual clock nothing is computed between two such steps, so that only their sum matters.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from loraplex.scheduling.blocks import BlockPool
from loraplex.scheduling.sequence import Sequence


def leap_length(running: Many[Sequence], pool: BlockPool, max_model_len: int) -> int:
    """Steps up to the first end of a request, or until empty blocks may run out."""
    num_steps = max_model_len
    for sequence in running:
        if sequence.num_remaining != 1 or sequence.num_unknown > 0 or sequence.num_output == 0:
            return 0  # of a prompt's last token comes a first one, at a time of its own
        num_steps = min(num_steps, max_model_len - len(sequence.token_ids))
        max_tokens = sequence.request.params.max_tokens
        if max_tokens is not None:
            num_steps = min(num_steps, max_tokens - sequence.num_output)
    if not running or num_steps <= 0:
        return 0
    if len(running) * (num_steps // pool.block_size + 1) > pool.num_empty:
        # No more than this many new blocks each: every one of them needs one in as many steps, or sooner.
        num_steps = min(num_steps, (pool.num_empty // len(running) - 1) * pool.block_size)
    return max(num_steps, 0)


def decode_all(sequence: Sequence, pool: BlockPool, num_steps: int, token_id: int) -> None:
    """Up to the last of the steps, whose token is yet to be accepted."""
    sequence.num_computed += num_steps
    missing = pool.blocks_for(sequence.num_computed) - len(sequence.block_ids)
    if missing > 0:
        blocks = pool.allocate(missing)
        assert blocks is not None, "a leap is no longer than empty blocks last"
        sequence.block_ids += blocks
    sequence.token_ids += [token_id] * (num_steps - 1)
