"""Matrices read from a file by compiled code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.kernels.cpu import file_matrices, team
from loraplex.kernels.cpu.file_matrices import FileMatrix, read_matrices

BEGIN = 6


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    path = tmp_path / "weights"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    yield fd, path
    os.close(fd)


def scratch(num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.zeros(num_bytes, dtype=np.uint8)


@given(
    num_rows=st.integers(1, 100),
    num_columns=st.integers(1, 40),
    columns=st.tuples(st.integers(0, 39), st.integers(0, 39)),
    transposed=st.booleans(),
    element=st.sampled_from([np.int16, np.int32]),
    rows_in_scratch=st.integers(1, 50),
)
@settings(deadline=None, max_examples=examples(30, 60))
def test_a_part_of_a_matrix_arrives_as_it_is_asked_for(
    tmp_path_factory: pytest.TempPathFactory,
    num_rows: int,
    num_columns: int,
    columns: tuple[int, int],
    transposed: bool,
    element: type[np.int16 | np.int32],
    rows_in_scratch: int,
) -> None:
    first, last = sorted(column % num_columns for column in columns)
    matrix = np.arange(num_rows * num_columns, dtype=element).reshape(num_rows, num_columns)
    path = tmp_path_factory.mktemp("file") / "weights"
    path.write_bytes(b"x" * BEGIN + matrix.tobytes())
    wanted = matrix[:, first : last + 1]
    wanted = wanted.T if transposed else wanted
    found = np.full(wanted.size + 1, -1, dtype=element)
    fd = os.open(path, os.O_RDONLY)
    num_read = read_matrices(
        fd,
        [
            FileMatrix(
                begin=BEGIN,
                num_rows=num_rows,
                num_columns=num_columns,
                first_column=first,
                end_column=last + 1,
                target=found.ctypes.data,
                transposed=transposed,
                element_bytes=matrix.itemsize,
            )
        ],
        scratch(rows_in_scratch * num_columns * matrix.itemsize),
    )
    os.close(fd)
    assert num_read == 1
    assert found[:-1].reshape(wanted.shape).tolist() == wanted.tolist()
    assert found[-1] == -1, "nothing is written behind it"


@pytest.mark.parametrize("num_rows", [4, 12, 100, 4096])
@pytest.mark.parametrize("width", [4, 8, 64])
@pytest.mark.parametrize("rows_in_scratch", [4, 6, 1000])
@pytest.mark.parametrize("first", [0, 4])
def test_elements_of_two_bytes_are_turned_by_fours(
    tmp_path: Path, num_rows: int, width: int, rows_in_scratch: int, first: int
) -> None:
    matrix = np.random.default_rng(0).integers(-(2**15), 2**15, (num_rows, width + first)).astype(np.int16)
    path = tmp_path / "weights"
    path.write_bytes(b"x" * BEGIN + matrix.tobytes())
    found = np.full(num_rows * width + 1, -1, dtype=np.int16)
    wanted = FileMatrix(
        begin=BEGIN,
        num_rows=num_rows,
        num_columns=width + first,
        first_column=first,
        end_column=first + width,
        target=found.ctypes.data,
        transposed=True,
        element_bytes=2,
    )
    fd = os.open(path, os.O_RDONLY)
    assert read_matrices(fd, [wanted], scratch(rows_in_scratch * wanted.row_bytes)) == 1
    os.close(fd)
    assert (found[:-1].reshape(width, num_rows) == matrix[:, first:].T).all()
    assert found[-1] == -1


def test_many_threads_at_first_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(team, "kernel", lambda body: compiled.append(body) or 1)
    file_matrices._compiled.cache_clear()
    with ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            threads.submit(file_matrices.compile_reader)
    file_matrices._compiled.cache_clear()
    assert len(compiled) == 1


def test_what_follows_the_end_of_the_file_is_not_read(opened: tuple[int, Path]) -> None:
    fd, path = opened
    path.write_bytes(np.arange(10, dtype=np.int16).tobytes())
    found = np.zeros((3, 4), dtype=np.int16)
    matrices = [
        FileMatrix(
            begin=8 * row,
            num_rows=1,
            num_columns=4,
            first_column=0,
            end_column=4,
            target=found[row:].ctypes.data,
            transposed=False,
            element_bytes=2,
        )
        for row in range(3)
    ]
    assert read_matrices(fd, matrices, scratch(8)) == 2
    assert found[:2].ravel().tolist() == list(range(8))


def test_a_file_that_cannot_be_read_is_told_by_the_count(tmp_path: Path) -> None:
    found = np.zeros(4, dtype=np.int16)
    matrix = FileMatrix(
        begin=0,
        num_rows=1,
        num_columns=4,
        first_column=0,
        end_column=4,
        target=found.ctypes.data,
        transposed=True,
        element_bytes=2,
    )
    fd = os.open(tmp_path, os.O_RDONLY)  # a folder
    assert read_matrices(fd, [matrix], scratch(8)) == 0
    os.close(fd)
