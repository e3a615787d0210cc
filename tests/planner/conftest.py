"""Fixtures of these tests."""

from pictures import readable_pictures  # noqa: F401
