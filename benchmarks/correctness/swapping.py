"""Section `swapping`: requests whose keys and values are copied to the host and back.

There is memory for a part of what runs, so that requests are preempted again and again. On a GPU their keys
and values come back from the host; elsewhere they are computed again. Texts must be those of requests alone.
"""

from __future__ import annotations

from typing import Final

import torch

from benchmarks.correctness.check import Check, Setting, holds
from benchmarks.correctness.comparing import alone_check
from benchmarks.correctness.driving import answers, greedy_request, random_prompt
from benchmarks.correctness.random_engines import build, distinct_specs
from benchmarks.device_memory import release
from loraplex.core.request import FinishReason
from loraplex.model.shapes import config_of_shape

ROOM: Final = 0.4
"""The engine's memory, as a part of what all requests would take."""
COMPARED_EVERY: Final = 8
TIE: Final = 1e-3
"""Log-probabilities that differ by less are a tie, in float32."""
_SWAP_BYTES: Final = 24 << 30


def swapping(setting: Setting) -> list[Check]:
    shape = config_of_shape(setting.large_shape).shape
    num_requests, prompt_tokens, num_tokens = (60, 40, 120) if setting.tiny else (64, 200, 240)
    specs = distinct_specs("swap", setting.large_shape, num_adapters=4, ranks=[16], modules="q,k,v")
    token_bytes = 2 * shape.num_layers * shape.kv_size * torch.float32.itemsize
    needed_bytes = num_requests * (prompt_tokens + num_tokens) * token_bytes
    engine = build(
        setting.large_shape, setting, int(ROOM * needed_bytes), torch.float32, kv_swap_bytes=_SWAP_BYTES
    )
    lanes = [None, *specs]
    for spec in specs:
        engine.add_adapter(spec)
    requests = []
    for index in range(num_requests):
        lane = lanes[index % len(lanes)]
        prompt = random_prompt(prompt_tokens, shape.vocab_size, index)
        requests.append(
            greedy_request(str(index), prompt, num_tokens, None if lane is None else lane.version)
        )
    ended = answers(engine, requests)
    stats = engine.stats()
    engine.close()
    del engine
    release()
    is_whole = [
        ended[each.request_id].finish_reason is FinishReason.LENGTH
        and len(ended[each.request_id].token_ids) == num_tokens
        for each in requests
    ]
    swaps = setting.device == "cuda"
    return [
        holds(
            "answers",
            f"{num_requests} requests with memory for a part of them: all get all their tokens",
            all(is_whole),
            preemptions=stats.num_preemptions,
        ),
        holds(
            "preemptions",
            "requests were preempted, and their blocks were copied to the host and back"
            if swaps
            else "requests were preempted",
            stats.num_preemptions > 0 and (stats.kv_blocks_swapped_in > 0 or not swaps),
            blocks_out=stats.kv_blocks_swapped_out,
            blocks_in=stats.kv_blocks_swapped_in,
        ),
        alone_check(
            build(setting.large_shape, setting, None, torch.float32),
            "of them",
            [
                (request, lanes[index % len(lanes)], ended[request.request_id].token_ids)
                for index, request in list(enumerate(requests))[::COMPARED_EVERY]
            ],
            TIE,
        ),
    ]
