"""Everything that serving launches is compiled before: found out by Triton's own keys, without a device.

In a process of its own, as kernels are interpreted in this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex.core import paths
from loraplex.engine.cuda import compilation

SCRIPT = """
import json, sys
from dataclasses import replace
import torch, triton
from triton import knobs
from triton.backends.compiler import GPUTarget

class Device:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Device())

from loraplex.core.modules import GROUPS
from loraplex.engine.cuda.compilation import CompiledFor, needed_launches
from loraplex.engine.cuda.cpu_assist import meta_memory
from loraplex.engine.cuda.device_arena import DeviceArena
from loraplex.engine.cuda.graph_queue import GraphKey
from loraplex.engine.cuda.step_runner import StepRunner
from loraplex.engine.cuda.step_sizes import (
    all_graph_sizes, assisted_graph_sizes, decode_sizes, mixed_sizes,
)
from loraplex.kernels.triton import decode_attention
from loraplex.kernels.triton.kernel import collect_launches
from loraplex.kernels.triton.triton_kernels import TritonKernels
from loraplex.model.decoder import Decoder
from loraplex.model.shapes import config_of_shape, meta_weights

decode_attention._MANY_PROGRAMS = 300  # so that some steps of this small shape have that many
keys = set()
# Nothing is compiled: what the hook says is compiled elsewhere.
knobs.runtime.jit_cache_hook = lambda *, key, repr, **_: keys.add((repr, key)) or True

def found_of(family):
    keys.clear()
    config, dtype, num_sms = config_of_shape("tiny"), torch.bfloat16, 132
    config = replace(config, qk_norm=family == "qwen3", qkv_bias=family == "qwen2")
    launches = needed_launches(CompiledFor(
        config=config, dtype=dtype, block_size=16, num_sms=num_sms, num_workers=3
    ))
    for launch in launches:
        launch.compile()
    compiled = set(keys)

    meta = torch.device("meta")  # as good as any: nothing is computed
    def runner_of(config):
        arena = DeviceArena(config.shape, num_pages=9, block_size=16, dtype=dtype, device=meta)
        kernels = TritonKernels(config.shape, meta, num_sms)
        return StepRunner(
            decoder=Decoder(config, meta_weights(config, dtype), kernels, 128),
            caches=arena.caches, num_seats=8, max_blocks=40, scratch_slot=arena.scratch_slot,
            ticket_1=torch.empty(1, dtype=torch.int64, device=meta), device=meta, recorder=None,
            assist=meta_memory(dtype, 3),
        )

    sizes = [*all_graph_sizes(40, 2), *assisted_graph_sizes(40, 2)]
    sizes += [replace(size, assists=4) for size in all_graph_sizes(40, 2) if size.spans > 0]
    sizes += [*(decode_sizes(rows, 3) for rows in range(1, 40))]
    sizes += [
        mixed_sizes(rows, decodes, spans, 5, 2) for rows in (17, 33) for decodes in (1, 7) for spans in (1, 3)
    ]
    runners = [(runner_of(config), sizes)]
    for layers in (3, 16):  # numbers that have the layers in them are odd, or divisible by 16
        deeper = replace(config, shape=replace(config.shape, num_layers=layers))
        runners.append((runner_of(deeper), [
            decode_sizes(8, 3), mixed_sizes(33, 7, 3, 5, layers), mixed_sizes(64, 32, 32, 5, layers, 4),
        ]))
    with collect_launches() as served:
        for runner, sizes in runners:
            for size in sizes:
                for groups in (frozenset(), frozenset({"qkv"}), frozenset(GROUPS)):
                    for shares in {False, bool(groups) and size.spans == 0}:
                        runner.launch_padding(GraphKey(size, groups, shares))
    for launch in served.values():
        launch.compile()
    return {"needed": len(launches), "compiled": len(compiled), "missing": sorted(keys - compiled)}

print(json.dumps({family: found_of(family) for family in sys.argv[1:]}))
"""


@pytest.mark.slow
def test_every_variant_of_every_kernel_is_compiled_ahead(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    families = ("llama", "qwen2", "qwen3")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *families],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(families)
    for family, launches in found.items():
        assert launches["missing"] == [], family
        assert launches["needed"] == launches["compiled"] > 30, "one launch for each variant, and none twice"


MERGE_SCRIPT = """
import json
from dataclasses import replace
import torch, triton
from triton import knobs
from triton.backends.compiler import GPUTarget

class Device:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Device())

from loraplex.engine.cuda.compilation import CompiledFor, _meta_adapter, needed_launches
from loraplex.kernels.triton.kernel import collect_launches
from loraplex.kernels.triton.triton_kernels import TritonKernels
from loraplex.model.decoder import Decoder
from loraplex.model.shapes import config_of_shape, meta_weights

keys = set()
knobs.runtime.jit_cache_hook = lambda *, key, repr, **_: keys.add((repr, key)) or True
config, dtype = config_of_shape("tiny"), torch.bfloat16
wanted = CompiledFor(config=config, dtype=dtype, block_size=16, num_sms=132)
plain = needed_launches(wanted)
merging = needed_launches(replace(wanted, merges=True))
for launch in merging:
    launch.compile()
compiled = set(keys)
with collect_launches() as served:
    for layers in (1, 3, 16):
        deeper = replace(config, shape=replace(config.shape, num_layers=layers))
        kernels = TritonKernels(deeper.shape, torch.device("meta"), 132)
        Decoder(deeper, meta_weights(deeper, dtype), kernels, 128).merge(_meta_adapter(deeper.shape))
for launch in served.values():
    launch.compile()
print(json.dumps({
    "more": len(merging) - len(plain), "served": len(served), "missing": sorted(keys - compiled)
}))
"""


@pytest.mark.slow
def test_merge_kernels_are_compiled_ahead_only_where_adapters_are_merged(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", MERGE_SCRIPT],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # One for each group: q, k and v; o; gate and up; down.
    assert found == {"more": 4, "served": 4, "missing": []}


def test_compiled_kernels_are_kept_with_what_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_HOME", raising=False)
    monkeypatch.setenv("LORAPLEX_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/chosen/by/the/user")
    compilation.keep_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == "/chosen/by/the/user"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    compilation.keep_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == str(paths.cache_dir() / "triton")
    assert (tmp_path / "triton").is_dir()
    monkeypatch.delenv("TRITON_CACHE_DIR")
    (tmp_path / "file").touch()
    monkeypatch.setenv("LORAPLEX_CACHE", str(tmp_path / "file"))
    compilation.keep_compiled_kernels()
    assert "TRITON_CACHE_DIR" not in os.environ, "Triton's own place remains"
