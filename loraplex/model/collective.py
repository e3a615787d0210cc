"""Collective operations between the processes that share a model (tensor parallelism).

Every process calls the same operations in the same order on tensors of the same shape. The results are
bitwise equal in all of them, so that all sample the same tokens.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from loraplex.model.sharding import Shard

_TIMEOUT: Final = timedelta(minutes=5)
"""Timeout of an operation. A process that died is noticed sooner: its connections close."""


class Collective(Protocol):
    """The collective operations of one process."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum over all processes, in place."""
        ...

    def gather_columns(self, x_LV: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Return the columns of all processes side by side, without the padding beyond `num_columns`."""
        ...


class Solo:
    """The collective of a process that has the whole model."""

    def all_reduce(self, x: torch.Tensor) -> None:
        pass

    def gather_columns(self, x_LV: torch.Tensor, num_columns: int) -> torch.Tensor:
        return x_LV


SOLO: Final = Solo()


class GroupCollective:
    """A collective over a gloo process group of torch.distributed that belongs to this object alone."""

    def __init__(self, group: Any, count: int) -> None:
        self._group = group
        self._count = count

    def all_reduce(self, x: torch.Tensor) -> None:
        self._group.allreduce([x]).wait()

    def gather_columns(self, x_LV: torch.Tensor, num_columns: int) -> torch.Tensor:
        num_rows, width = x_LV.shape
        if num_rows == 0:
            return x_LV.new_empty(0, num_columns)
        parts_NLV = x_LV.new_empty(self._count * num_rows, width)
        self._group._allgather_base(parts_NLV, x_LV.contiguous()).wait()
        gathered_LV = x_LV.new_empty(num_rows, num_columns)
        for index, part_LV in enumerate(parts_NLV.view(self._count, num_rows, width)):
            columns = gathered_LV[:, index * width : (index + 1) * width]
            columns.copy_(part_LV[:, : columns.shape[1]])
        return gathered_LV

    def abort(self) -> None:
        """Abort operations in other threads, because one of the processes is gone.

        A no-op with gloo: operations fail when that process's connections close.
        """

    def close(self) -> None:
        """Leave the group; processes that wait for this one fail."""
        self._group = None


class NcclCollective(GroupCollective):
    """A collective between CUDA devices; all its operations can be captured in graphs."""

    def abort(self) -> None:
        group = self._group  # another thread may be closing
        if group is not None:
            group.abort()  # otherwise kernels wait forever

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()
        super().close()


def connect(shard: Shard, rendezvous: Path, device: torch.device) -> GroupCollective:
    """Connect to the other shards' processes through a file that all of them name; returns once all are
    connected.

    Uses gloo between CPUs, over the loopback interface, and NCCL between CUDA devices, one for each process.
    After that, gloo does not need the file; NCCL reads it until it is closed, and hangs if it is gone.
    """
    # Made by hand, not by `init_process_group`: that group belongs to the whole process, and an application
    # that embeds an engine may have its own.
    import torch.distributed

    distributed: Any = torch.distributed  # its stubs lack half of what it exports
    store = distributed.FileStore(str(rendezvous), shard.count)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        nccl = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = _TIMEOUT
        group = nccl(store, shard.index, shard.count, options)
        collective: GroupCollective = NcclCollective(group, shard.count)
    else:
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        group = gloo(store, shard.index, shard.count, options)
        collective = GroupCollective(group, shard.count)
    collective.all_reduce(torch.zeros(1, device=device))  # NCCL connects with the first operation
    return collective
