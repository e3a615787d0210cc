"""Detecting from fstat alone that an adapter's files are no longer those that were hashed.

A fingerprint is `WEIGHTS+CONFIG`, each `size-mtime_ns-inode`. A loader compares it with that of the files it
is about to read, and a restarting server before it trusts a stored spec.
"""

from __future__ import annotations

import os
import stat

from loraplex.adapters.spec import CONFIG_FILE, AdapterSpec


def file_fingerprint(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"


def join_fingerprints(*, weights: os.stat_result, config: os.stat_result) -> str:
    return f"{file_fingerprint(weights)}+{file_fingerprint(config)}"


def files_unchanged(spec: AdapterSpec) -> bool:
    """Return whether config and weights on disk are those of the spec; False if either is gone."""
    try:
        weights = os.stat(spec.weights_path)
        config = os.stat(spec.path / CONFIG_FILE)
    except (OSError, ValueError):
        return False
    if not (stat.S_ISREG(weights.st_mode) and stat.S_ISREG(config.st_mode)):
        return False
    return spec.fingerprint == join_fingerprints(weights=weights, config=config)
