"""Start commands of the servers of the HTTP comparison."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.http_checkpoint import HttpCheckpoint
from benchmarks.http_client import VLLM
from benchmarks.servers import ServerCommand
from benchmarks.sources import ROOT

MEMORY_FRACTION: Final = "0.85"
_VLLM_ENV: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer compiles its kernels at run time, which needs nvcc
    # A machine without a network has no address at which engine processes could connect.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The servers of one checkpoint. `vllm_python`: the Python that runs vLLM. `vllm_site`: a folder with
    vLLM and its dependencies, None if that Python has them."""

    checkpoint: HttpCheckpoint
    state_dir: Path
    device: str = "cuda"
    dtype: str = "bfloat16"
    vllm_python: str = sys.executable
    vllm_site: Path | None = None

    def command(self, name: str, *, home: Path | None = None) -> ServerCommand:
        """Return the start command of a server; `home` gives loraplex its own caches."""
        if name == "loraplex":
            return self._loraplex(home)
        return self._vllm(lora=name == "vllm-lora")

    @property
    def vllm_env(self) -> Mapping[str, str]:
        return {**_VLLM_ENV, **self._python_path(())}

    def _loraplex(self, home: Path | None) -> ServerCommand:
        args = (
            *(sys.executable, "-m", "loraplex.cli.main", "serve", "--model", str(self.checkpoint.base)),
            *("--served-model-name", "base", "--adapters", str(self.checkpoint.adapters)),
            *("--device", self.device, "--dtype", self.dtype, "--port", "{port}"),
            *("--state-dir", str(self.state_dir)),
        )
        on_gpu = ("--memory-fraction", MEMORY_FRACTION, "--host-adapter-memory", "24GiB")
        return ServerCommand(
            args=(*args, *(on_gpu if self.device == "cuda" else ())),
            env={**self._python_path((ROOT,)), **({} if home is None else _caches_in(home))},
        )

    def _vllm(self, *, lora: bool) -> ServerCommand:
        max_tokens = str(self.checkpoint.max_positions)
        args = [
            *(self.vllm_python, "-m", VLLM, "serve", str(self.checkpoint.base)),
            *("--served-model-name", "base"),
            *("--port", "{port}", "--dtype", self.dtype, "--max-model-len", max_tokens),
            *("--gpu-memory-utilization", MEMORY_FRACTION, "--no-enable-prefix-caching"),
        ]
        if lora:
            args += ["--enable-lora", "--max-loras", "64", "--max-lora-rank", str(self.checkpoint.rank)]
            args += ["--max-cpu-loras", "128", "--lora-target-modules", "qkv_proj", "--lora-modules"]
            names = self.checkpoint.adapter_names
            args += [f"{name}={self.checkpoint.adapters / name}" for name in names]
        return ServerCommand(args=tuple(args), env=self.vllm_env)

    def _python_path(self, first: tuple[Path, ...]) -> dict[str, str]:
        inherited = os.environ.get("PYTHONPATH")
        places = [*map(str, first), *([str(self.vllm_site)] if self.vllm_site else [])]
        return {"PYTHONPATH": os.pathsep.join([*places, *([inherited] if inherited else [])])}


def _caches_in(home: Path) -> dict[str, str]:
    """Return variables that put everything a start leaves for the next one under `home`."""
    return {
        "HOME": str(home),
        "PYTHONUSERBASE": site.getuserbase(),  # otherwise packages installed for the user would not be found
        "XDG_CACHE_HOME": str(home / ".cache"),
        "LORAPLEX_CACHE": str(home / ".cache" / "loraplex"),
        "TRITON_CACHE_DIR": str(home / ".triton" / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / ".cache" / "inductor"),
        "CUDA_CACHE_PATH": str(home / ".nv"),
        "NUMBA_CACHE_DIR": str(home / ".cache" / "numba"),
    }


def shown_command(command: ServerCommand) -> str:
    """Return the command for publication: without this machine's folders and the list of adapters."""
    args = list(command.args)
    if "--lora-modules" in args:
        args = [*args[: args.index("--lora-modules") + 1], "..."]
    shown = [Path(arg).name if arg.startswith("/") else arg for arg in args]
    text = " ".join(shown)
    for module, program in (("loraplex.cli.main", "loraplex"), (VLLM, "vllm")):
        text = text.replace(f"{shown[0]} -m {module}", program)
    return text
