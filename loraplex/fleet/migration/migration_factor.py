"""dLoRA's gamma: execution time with migration over execution time without."""

from __future__ import annotations

from loraplex.core.errors import UserError


class MigrationFactor:
    """Counts the seconds that replicas execute requests, and the seconds that migrations caused.

    A fleet whose requests move often has a large factor, which makes each further move more expensive.
    """

    def __init__(self, useful_s: float = 0.0, migration_s: float = 0.0) -> None:
        """`useful_s`, `migration_s`: seconds that were recorded before."""
        self._useful_s = useful_s
        self._migration_s = migration_s

    @property
    def recorded_s(self) -> tuple[float, float]:
        """All recorded seconds: of executions, and of migrations."""
        return self._useful_s, self._migration_s

    def record_execution(self, seconds: float) -> None:
        """Record time in which a replica executed requests, except that of `record_migration`."""
        self._useful_s += _at_least_zero(seconds)

    def record_migration(self, seconds: float) -> None:
        """Record time in which a replica prefilled migrated tokens again, or loaded an adapter for them."""
        self._migration_s += _at_least_zero(seconds)

    @property
    def gamma(self) -> float:
        """The factor: at least one, and one as long as nothing was executed."""
        return 1.0 + self._migration_s / self._useful_s if self._useful_s > 0 else 1.0


def _at_least_zero(seconds: float) -> float:
    if not seconds >= 0:
        raise UserError(f"a time of {seconds:g} s cannot be counted; it must be zero or more")
    return seconds
