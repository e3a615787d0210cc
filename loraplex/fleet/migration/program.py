"""A linear or mixed-integer program over sparse arrays, solved by HiGHS.

Columns and rows are numpy blocks, and the solver gets all of them in one call: building a program from one
Python expression per row takes longer than solving it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from loraplex.core.arrays import BoolArray, FloatArray, IntArray


class Solution(NamedTuple):
    """The values of all columns. `bound`: a lower bound on the objective of any solution."""

    values: FloatArray
    objective: float
    bound: float


class Program:
    """Minimise `offset + costs @ x` under bounds on x and on `rows @ x`, where some x are integers."""

    def __init__(self) -> None:
        self._costs: list[FloatArray] = []
        self._uppers: list[FloatArray] = []
        self._integers: list[BoolArray] = []
        self._row_uppers: list[FloatArray] = []
        self._row_lowers: list[FloatArray] = []
        self._entries: list[tuple[IntArray, IntArray, FloatArray]] = []
        self._num_columns = 0
        self._num_rows = 0
        self.offset = 0.0

    def add_columns(
        self,
        count: int,
        *,
        cost: float | FloatArray = 0.0,
        upper: float | FloatArray = np.inf,
        integer: bool = False,
    ) -> IntArray:
        """Add columns with values of zero or more, and return their numbers."""
        first, self._num_columns = self._num_columns, self._num_columns + count
        self._costs.append(_filled(cost, count))
        self._uppers.append(_filled(upper, count))
        self._integers.append(np.full(count, integer))
        return np.arange(first, first + count, dtype=np.int64)

    def add_rows(
        self, count: int, *, lower: float | FloatArray = -np.inf, upper: float | FloatArray = np.inf
    ) -> IntArray:
        """Add rows without entries, and return their numbers."""
        first, self._num_rows = self._num_rows, self._num_rows + count
        self._row_lowers.append(_filled(lower, count))
        self._row_uppers.append(_filled(upper, count))
        return np.arange(first, first + count, dtype=np.int64)

    def add_entries(self, rows: IntArray, columns: IntArray, values: float | FloatArray) -> None:
        """Add coefficients. No pair of a row and a column may be added twice."""
        assert len(rows) == len(columns)
        self._entries.append((rows, columns, _filled(values, len(rows))))

    @property
    def has_integers(self) -> bool:
        return any(each.any() for each in self._integers)

    def model(self, highspy: Any) -> Any:
        """Return the program in the form of HiGHS. `highspy`: the module, imported by the caller."""
        rows, columns, values = (np.concatenate(each) for each in zip(*self._entries, strict=True))
        order = np.argsort(columns, kind="stable")
        counts = np.bincount(columns, minlength=self._num_columns)
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = self._num_columns, self._num_rows
        model.offset_ = self.offset
        model.col_cost_ = np.concatenate(self._costs)
        model.col_lower_ = np.zeros(self._num_columns)
        model.col_upper_ = np.concatenate(self._uppers)
        model.row_lower_ = np.concatenate(self._row_lowers)
        model.row_upper_ = np.concatenate(self._row_uppers)
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_ = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        model.a_matrix_.index_ = rows[order].astype(np.int32)
        model.a_matrix_.value_ = values[order]
        if self.has_integers:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            model.integrality_ = [kinds[each] for each in np.concatenate(self._integers).tolist()]
        return model


def solve(program: Program, *, relative_gap: float = 0.0, max_nodes: int | None = None) -> Solution | None:
    """Return the best solution found, or None if there is none.

    One thread, a fixed seed, and a limit on nodes instead of seconds make it deterministic: equal programs
    have equal solutions. `relative_gap`: how far above the bound an integer solution may be, relative to it.
    `max_nodes`: None for no limit.
    """
    import highspy  # keeps importing the fleet's decisions cheap

    has_integers = program.has_integers
    options: dict[str, bool | int | float | str] = {"output_flag": False, "threads": 1, "random_seed": 0}
    if has_integers:
        options |= {"mip_rel_gap": relative_gap, "mip_abs_gap": 0.0}
        options |= {} if max_nodes is None else {"mip_max_nodes": max_nodes}
    else:
        options |= {"presolve": "off"}  # it takes longer than it saves on programs of this kind
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, value in options.items():
        highs.setOptionValue(option, value)
    highs.passModel(program.model(highspy))
    highs.run()
    info = highs.getInfo()
    if info.primal_solution_status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
        return None
    objective = float(info.objective_function_value)
    bound = float(info.mip_dual_bound) if has_integers else objective
    return Solution(np.array(highs.getSolution().col_value), objective, bound)


def _filled(values: float | FloatArray, count: int) -> FloatArray:
    return np.broadcast_to(np.asarray(values, np.float64), count)
