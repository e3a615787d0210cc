"""A cache that tenants share: who has most loses first."""

from __future__ import annotations

import pytest

from loraplex.engine.tenant_cache import TenantCache


def put(cache: TenantCache[str, str], tenant: str, *keys: str) -> None:
    for key in keys:
        assert cache.get(key, tenant, lambda key=key: key) == key  # type: ignore[misc]


def kept(cache: TenantCache[str, str], *keys: str) -> str:
    return "".join(key for key in keys if key in cache._entries)


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ((("a", "wxyz"), ("b", "1")), "xyz1"),
        ((("a", "wx"), ("b", "12345")), "wx45"),
        ((("a", "wx"), ("a", "w"), ("a", "yzv")), "wyzv"),  # used again
        ((("a", "wx"), ("b", "12"), ("c", "p")), "x12p"),  # of equal ones, the one used longest ago
        ((("a", "wxyz"), ("b", "1234"), ("a", "v")), "zv34"),
        ((("a", "w"), ("b", "x"), ("c", "y"), ("d", "z"), ("e", "1"), ("e", "2345")), "xyz5"),
    ],
)
def test_who_has_most_entries_loses_the_one_used_longest_ago(
    used: tuple[tuple[str, str], ...], expected: str
) -> None:
    cache = TenantCache[str, str](4)
    for tenant, keys in used:
        put(cache, tenant, *keys)
    assert kept(cache, *"wxyzv12345p") == expected
    assert sum(cache._num_of.values()) == len(cache._entries) == 4


def test_what_fails_is_made_again() -> None:
    cache = TenantCache[str, str](4)

    def fail() -> str:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            cache.get("k", "a", fail)
    put(cache, "a", "k")
