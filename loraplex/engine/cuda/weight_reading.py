"""Reads a checkpoint's weights onto a device in threads, beside the rest of the start."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Final

import torch

from loraplex.engine.cuda.streams import use_device
from loraplex.engine.cuda.weight_copies import MAX_THREADS, WeightCopies
from loraplex.engine.machine import num_cores
from loraplex.engine.parallel.messages import Progress
from loraplex.model.config import ModelConfig
from loraplex.model.sharding import Shard
from loraplex.model.weights import ModelWeights, load_weights

_REPORT_S: Final = 0.1


class WeightReading:
    """A read of a shard's weights, which starts when it is constructed. `finish` waits for it."""

    def __init__(
        self, folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        """`config`: the whole model's."""
        self._fraction = 0.0
        initializer = partial(use_device, device)
        self._copying = ThreadPoolExecutor(min(num_cores(), MAX_THREADS), "weights", initializer)
        self._leading = ThreadPoolExecutor(1, "weights-lead", initializer)
        self._loaded: Future[ModelWeights] = self._leading.submit(
            load_weights,
            folder,
            config,
            dtype,
            self._on_bytes,
            shard,
            place=WeightCopies(device, dtype),
            threads=self._copying,
        )

    def finish(self, report: Progress) -> ModelWeights:
        """Wait for the weights and return them. Raises what reading them raised."""
        while not wait([self._loaded], _REPORT_S).done:
            report("reading weights", self._fraction)
        weights = self._loaded.result()
        self.close()
        return weights

    def close(self) -> None:
        """Cancel what has not begun; does not wait for the rest."""
        self._copying.shutdown(wait=False, cancel_futures=True)
        self._leading.shutdown(wait=False, cancel_futures=True)

    def _on_bytes(self, done: int, total: int) -> None:
        self._fraction = done / max(total, 1)
