"""Lengths: within their bounds, with their median, or just those that were seen."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.workload import WorkloadError
from loraplex.workload.length_files import read_lengths
from loraplex.workload.lengths import (
    BoundedLengths,
    EmpiricalTokens,
    FixedTokens,
    IndependentLengths,
    LogNormalTokens,
    PairedLengths,
    QuantileLengths,
)

QUANTILES = ["p5", "p25", "p50", "p75", "p90", "p95", "p99", "max"]


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def file(tmp_path: Path, text: str, name: str = "lengths.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@given(
    median=st.integers(1, 4_000), sigma=st.floats(0, 2), least=st.integers(1, 50), most=st.integers(1, 9_000)
)
def test_log_normal_lengths_keep_median_and_bounds(median: int, sigma: float, least: int, most: int) -> None:
    least, most = min(least, median), max(most, median)
    drawn = LogNormalTokens(median=median, sigma=sigma, least=least, most=most).draw(rng(), 20_000)
    assert drawn.min() >= least
    assert drawn.max() <= most
    assert np.median(drawn) == pytest.approx(median, rel=0.06 * max(sigma, 0.1), abs=1)


def test_the_defaults_look_like_chat() -> None:
    drawn = LogNormalTokens(median=75, sigma=1.0, least=8, most=100_000).draw(rng(), 100_000)
    assert np.log(drawn).std() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    "options", [{"median": 0, "most": 9}, {"median": 10, "most": 9}, {"median": 5, "sigma": -1, "most": 9}]
)
def test_lengths_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(WorkloadError):
        LogNormalTokens(**{"sigma": 1.0} | options)
    with pytest.raises(WorkloadError):
        FixedTokens(tokens=0)


def test_pairs_stay_together_and_are_cut() -> None:
    seen = PairedLengths(prompts=np.array([5, 900]), outputs=np.array([50, 1]))
    prompts, outputs = BoundedLengths(lengths=seen, max_prompt_tokens=100).draw(rng(), 1_000)
    assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) == {(5, 50), (100, 1)}


def test_quantiles_are_met() -> None:
    levels = np.array([0.05, 0.5, 1.0])
    lengths = QuantileLengths(
        levels=levels, prompts=np.array([[10.0, 100.0, 1000.0]]), outputs=np.array([[0.0, 0.0, 7.0]])
    )
    prompts, outputs = lengths.draw(rng(), 50_000)
    assert np.quantile(prompts, [0.0, 0.05, 0.5, 1.0]).tolist() == pytest.approx(
        [10, 10, 100, 1000], rel=0.03
    )
    assert outputs.min() == 1, "a length of 0 is no request"
    assert outputs.max() == 7


@pytest.mark.parametrize("name", ["lengths.csv", "lengths.csv.gz"])
def test_files_of_pairs_of_outputs_and_of_quantiles(tmp_path: Path, name: str) -> None:
    pairs = read_lengths(file(tmp_path, "prompt_tokens,output_tokens\n74,918\n290,905\n", name))
    assert isinstance(pairs, PairedLengths)
    assert pairs.prompts.tolist() == [74, 290]
    outputs = read_lengths(file(tmp_path, "output_tokens\n40\n72\n\n", name))
    assert isinstance(outputs, EmpiricalTokens)
    both = IndependentLengths(prompt=FixedTokens(tokens=5), output=outputs)
    assert set(both.draw(rng(), 100)[1].tolist()) == {40, 72}
    heading = ",".join(["client", *(f"{side}_{level}" for side in ("in", "out") for level in QUANTILES)])
    row = "0,1,2,3,4,5,6,7,8,1,1,2,2,3,3,4,4"
    quantiles = read_lengths(file(tmp_path, f"{heading}\n{row}\n", name))
    assert isinstance(quantiles, QuantileLengths)
    assert quantiles.prompts.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert quantiles.outputs.tolist() == [[1, 1, 2, 2, 3, 3, 4, 4]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ": the file is empty"),
        ("prompt_tokens,output_tokens\n", ": no lengths in it"),
        ("prompt_tokens,tokens\n1,2\n", ":1: missing column output_tokens (there is prompt_tokens, tokens)"),
        (
            "prompt_tokens,output_tokens\n1,2\n1,-2\n",
            ":3: output_tokens must be a whole number of at least 1, not '-2'",
        ),
        ("output_tokens\n0\n", ":2: output_tokens must be"),
        ("output_tokens\n1.5\n", ":2: output_tokens must be"),
        ("output_tokens\n1e999\n", ":2: output_tokens must be"),
        ("prompt_tokens,output_tokens\n1\n", ":2: 1 value for 2 columns"),
        ('output_tokens\n"1\n', ":2: not CSV"),
        (
            ",".join(f"{side}_{level}" for side in ("in", "out") for level in QUANTILES)
            + "\n1,2,3,4,5,6,7,8,1,1,2,2,1,3,4,4\n",
            ":2: out_p90 1 is less than the quantile before it",
        ),
    ],
)
def test_a_bad_file_is_refused_with_line_and_column(tmp_path: Path, text: str, reason: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(WorkloadError) as caught:
        read_lengths(path)
    assert f"{path}{reason}" in str(caught.value)
