"""Section `kernels`: the row-wise kernels, and the choice of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.correctness.check import Check, Setting, holds, row_error, within
from benchmarks.correctness.kernel_batch import BLOCK_SIZE, kernel_batch
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.cuda.device_sampler import draw_tokens
from loraplex.engine.cuda.small_copies import SmallCopies
from loraplex.engine.draws import gumbel_noise, noise_key
from loraplex.engine.sampler import SamplingState
from loraplex.kernels.reference import TorchKernels
from loraplex.kernels.triton.rope import rope_and_cache
from loraplex.kernels.triton.rows import add_rms_norm, rms_norm, silu_mul
from loraplex.kernels.triton.tokens import greedy_tokens, pick_tokens
from loraplex.model.config import ModelConfig
from loraplex.model.rope import rope_table
from loraplex.model.shapes import config_of_shape

TORCH = TorchKernels()
EPS = 1e-5
SAMPLING: Sequence[dict[str, float]] = (
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7, "temperature": 2.0},
    {"top_p": 0.5},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.05, "temperature": 1.3},
)
DRAW_TOLERANCE = 1e-5
"""The largest error of the cumulative distribution: sums of a hundred thousand float32 weights are no more
exact."""


def row_checks(shape_name: str, setting: Setting, tolerance: float) -> list[Check]:
    config = config_of_shape(shape_name)
    num_rows = (1, 5) if setting.tiny else (1, 33, 2048)
    checks = [
        check
        for count in num_rows
        for check in (
            *_norms(config, count, setting, tolerance),
            _silu(config, count, setting, tolerance),
            *_rope(config, count, setting, tolerance),
        )
    ]
    checks += [*_greedy(config.shape.vocab_size, setting), _picked(setting)]
    return [
        replace(check, name=f"{shape_name}: {check.name}")
        for check in (*checks, _drawn(config.shape.vocab_size, setting))
    ]


def _norms(config: ModelConfig, num_rows: int, setting: Setting, tolerance: float) -> list[Check]:
    size = config.shape.hidden_size
    x, residual = _normal(setting, num_rows, size), _normal(setting, num_rows, size)
    weight = 1 + 0.1 * _normal(setting, size)
    checks = [
        within(
            f"rms_norm of {num_rows} rows",
            "rows against float64",
            row_error(rms_norm(x, weight, EPS), _norm64(x.double(), weight)),
            tolerance,
        )
    ]
    total = (x.float() + residual.float()).to(x.dtype)
    normed = add_rms_norm(x, residual, weight, EPS)
    error = row_error(normed, _norm64(total.double(), weight))
    checks.append(
        within(f"add_rms_norm of {num_rows} rows", "rows of the norm against float64", error, tolerance)
    )
    same = torch.equal(residual, total)
    checks.append(holds(f"residual of {num_rows} rows", "the sum in place, to the last bit", same))
    heads = _normal(setting, num_rows, config.shape.num_heads + 3, config.shape.head_dim)[:, 2:-1]
    weight = 1 + 0.1 * _normal(setting, config.shape.head_dim)
    error = row_error(rms_norm(heads, weight, EPS), _norm64(heads.double(), weight))
    checks.append(
        within(f"rms_norm of the heads of {num_rows} rows", "heads inside wider rows", error, tolerance)
    )
    return checks


def _norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


def _silu(config: ModelConfig, num_rows: int, setting: Setting, tolerance: float) -> Check:
    gate_up = 3 * _normal(setting, num_rows, 2 * config.shape.intermediate_size)
    error = row_error(silu_mul(gate_up), TORCH.silu_mul(gate_up.double()))
    return within(f"silu_mul of {num_rows} rows", "rows against float64", error, tolerance)


def _rope(config: ModelConfig, num_rows: int, setting: Setting, tolerance: float) -> list[Check]:
    shape, device, dtype = config.shape, setting.torch_device, setting.kernel_dtype
    num_blocks = num_rows // BLOCK_SIZE + 3
    qkv = _normal(setting, num_rows, shape.q_size + 2 * shape.kv_size)
    positions = torch.randint(shape.max_position, (num_rows,), device=device)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:num_rows]
    # Kernels round the table to their type: the angle's own rounding is no error of theirs.
    table = rope_table(config.rope, shape.max_position).to(device, dtype).float()
    size = (num_blocks, 3, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    arena, arena64 = torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, device=device).double()
    expected = qkv.double()
    batch = kernel_batch(device, positions_T=positions, slots_T=slots)
    TORCH.rope_and_cache(expected, table, batch, arena64[:, 1, 0], arena64[:, 1, 1])
    rope_and_cache(qkv, table, positions, slots, arena[:, 1, 0], arena[:, 1, 1])
    others = torch.ones(num_blocks * BLOCK_SIZE, dtype=torch.bool, device=device)
    others[slots] = False
    untouched = not arena[:, [0, 2]].any() and not _slots(arena, others.nonzero()[:, 0]).any()
    heads = (num_rows, -1, shape.head_dim)
    return [
        within(
            f"rope of {num_rows} rows",
            "q, k and v head by head against float64",
            row_error(qkv.view(heads), expected.view(heads)),
            tolerance,
        ),
        within(
            f"cache write of {num_rows} rows",
            "the rows' slots against float64",
            row_error(*(_slots(cache, slots) for cache in (arena, arena64))),
            tolerance,
        ),
        holds(f"cache write of {num_rows} rows elsewhere", "other slots and layers are as before", untouched),
    ]


def _slots(arena: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return arena[slots // BLOCK_SIZE, 1, :, :, slots % BLOCK_SIZE]


def _greedy(vocab_size: int, setting: Setting) -> list[Check]:
    num_rows, device = 3 if setting.tiny else 65, setting.torch_device
    logits = _normal(setting, num_rows, vocab_size)
    broken = torch.arange(num_rows, device=device) % 3 == 1
    logits[broken, vocab_size // 2] = torch.tensor([torch.nan, torch.inf, -torch.inf], device=device).to(
        logits.dtype
    )[torch.arange(int(broken.sum()), device=device) % 3]
    seats = torch.randperm(num_rows + 5, device=device)[:num_rows]
    last = torch.full((num_rows + 5,), -1, device=device)
    out = torch.full((num_rows, 2), -1, device=device)
    greedy_tokens(logits, seats, last, out)
    whole = ~broken.cpu().numpy()
    # numpy: of equal logits, of which half precision has many, the first.
    expected = np.argmax(logits.double().cpu().numpy()[whole], axis=-1)
    tokens, finite = out.cpu().numpy().T
    at_seats = torch.equal(last[seats], out[:, 0]) and int((last == -1).sum()) == 5
    return [
        holds(
            f"greedy tokens of {num_rows} rows",
            "the first of the likeliest, by float64; seats hold the same",
            bool((tokens[whole] == expected).all()) and at_seats,
        ),
        holds(
            f"broken rows among {num_rows}",
            "exactly rows with NaN or infinity are marked",
            bool((finite.astype(bool) == whole).all()),
        ),
    ]


def _picked(setting: Setting) -> Check:
    num_rows, device = 7 if setting.tiny else 2048, setting.torch_device
    last = torch.randint(0, 100, (num_rows + 3,), device=device)
    tokens = torch.randint(100, 200, (num_rows,), device=device)
    seats = torch.randperm(num_rows + 3, device=device)[:num_rows]
    follows = torch.randint(0, 2, (num_rows,), device=device)
    expected = torch.where(follows.bool(), last[seats], tokens)
    same = torch.equal(pick_tokens(tokens, follows, seats, last), expected)
    return holds(f"picked tokens of {num_rows} rows", "given tokens, or those of the seats", same)


def _drawn(vocab_size: int, setting: Setting) -> Check:
    """float32 logits, so that no two are equal and it is clear which candidates are left."""
    num_rows = 14 if setting.tiny else 140
    logits = 3 * torch.randn(num_rows, vocab_size, device=setting.torch_device)
    states = [_state(seed=seed, **SAMPLING[seed % len(SAMPLING)]) for seed in range(num_rows)]
    for index, state in enumerate(states):
        state.num_output = index % 3
    drawn = draw_tokens(logits, states, SmallCopies(setting.torch_device)).tolist()
    rows = zip(logits.double().cpu(), states, drawn, strict=True)
    worst = max(_draw_error(logits_V, state, token) for logits_V, state, token in rows)
    return within(
        f"device sampler of {num_rows} rows",
        "how far the drawn token's logit with its noise is below the best, by float64",
        worst,
        DRAW_TOLERANCE,
    )


def _draw_error(logits_V: torch.Tensor, state: SamplingState, token: int) -> float:
    """Temperature, min_p, top_k, top_p, spelled out one after the other."""
    params = state.params
    weights = torch.softmax(logits_V / params.temperature, dim=-1)
    weights[weights < params.min_p * weights.max()] = 0
    order = weights.argsort(descending=True, stable=True)
    if params.top_k:
        weights[order[params.top_k :]] = 0
    weights /= weights.sum()
    before = weights[order].cumsum(0) - weights[order]
    weights[order[before >= params.top_p]] = 0
    if weights[token] == 0:
        return math.inf
    noise = gumbel_noise(torch.arange(len(weights)), *noise_key(state.seed, state.num_output))
    scores = weights.log() + noise
    return float(scores.max() - scores[token])


def _state(*, seed: int, **params: float) -> SamplingState:
    settings = SamplingParams(seed=seed, **params)  # type: ignore[arg-type]
    return SamplingState(EngineRequest(request_id="r", prompt_token_ids=[1], params=settings))


def _normal(setting: Setting, *size: int) -> torch.Tensor:
    return torch.randn(size, device=setting.torch_device).to(setting.kernel_dtype)
