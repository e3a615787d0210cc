"""Whether an adapter's files are still those that were hashed, told from fstat alone.

A fingerprint is `WEIGHTS+CONFIG`, each `size-mtime_ns-inode`. The weights part is what a loader compares
with the file it has open; both parts are what a restart compares before it trusts a stored spec.
"""

from __future__ import annotations

import os
import stat

from loraplex.adapters.spec import CONFIG_FILE, AdapterSpec


def file_fingerprint(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"


def join_fingerprints(*, weights: os.stat_result, config: os.stat_result) -> str:
    return f"{file_fingerprint(weights)}+{file_fingerprint(config)}"


def weights_unchanged(spec: AdapterSpec, status: os.stat_result) -> bool:
    """Whether an open weights file (by its fstat) is the one whose hash is `spec.version`."""
    return spec.fingerprint.partition("+")[0] == file_fingerprint(status)


def files_unchanged(spec: AdapterSpec) -> bool:
    """Whether config and weights on disk are those of the spec; False if either is gone."""
    try:
        weights = os.stat(spec.weights_path)
        config = os.stat(spec.path / CONFIG_FILE)
    except (OSError, ValueError):
        return False
    if not (stat.S_ISREG(weights.st_mode) and stat.S_ISREG(config.st_mode)):
        return False
    return spec.fingerprint == join_fingerprints(weights=weights, config=config)
