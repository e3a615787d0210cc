"""Stops `make` with a clear message where Python is too old."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (this file exists to say so)
    found = ".".join(map(str, sys.version_info[:3]))
    sys.exit(f"loraplex needs Python 3.11 or newer, this is {found}. Try: make PYTHON=python3.12 demo")
