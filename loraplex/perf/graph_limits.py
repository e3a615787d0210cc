"""Limits of captured graphs that costs and policies depend on."""

from __future__ import annotations

from typing import Final

MAX_GRAPH_ROWS: Final = 1024
"""Rows of the largest step with prompts that is a captured graph: CPU workers assist with no others."""
