"""Seeded sampling that tolerates rounding: the token with the highest sum of logit and noise.

With Gumbel noise that is a draw from the softmax of the logits. The noise depends only on the request's seed,
the index of the token in the answer and the token's id. So another engine that continues a request, and
rounds logits differently, draws the same tokens unless the best two are nearly equal. A uniform number looked
up in the cumulative sum of the weights would depend on which tokens top_p leaves: with one more or less at
its edge, all tokens after it move.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

_STEPS: Final = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1))
"""Shifts and (signed) multipliers of a 32-bit mixing function."""


def noise_key(seed: int, index: int) -> tuple[int, int]:
    """Return the two signed 32-bit numbers that seed the noise of one token of an answer."""
    raw = np.random.Philox(key=seed, counter=index).random_raw()
    first, second = np.array([raw], dtype=np.uint64).view(np.int32).tolist()
    return first, second


def gumbel_noise(ids: torch.Tensor, first: int | torch.Tensor, second: int | torch.Tensor) -> torch.Tensor:
    """Return the noise of tokens in float64. `first`, `second`: a key, or columns of keys in int32."""
    # Two tokens of a key never have the same noise: each step is a bijection on 32 bits.
    bits = _mix(_mix(ids.to(torch.int32) ^ first).bitwise_xor_(second))
    uniform = bits.double().add_(2**31 + 0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Mix 32 bits in place so that each depends on all; products wrap around."""
    for shift, multiplier in _STEPS:
        bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (32 - shift) - 1)).mul_(multiplier)
    return bits
