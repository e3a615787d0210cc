#!/usr/bin/env bash
# Build llama.cpp's llama-server, the other peer of benchmarks/cpu_serve.py. Needs cmake, a C++ compiler and pip.
#
#   benchmarks/peers/setup_llama_cpp.sh [DIR]        default: build/llama.cpp
#
# The sources come from the package registry: the source distribution of llama-cpp-python contains them.
# Then: python -m benchmarks.cpu_serve --engines ...,llama.cpp --llama-server DIR/llama-server
set -euo pipefail

VERSION=0.3.36
DIR=${1:-build/llama.cpp}
PYTHON=${PYTHON:-python3}

mkdir -p "$DIR"
if [ ! -x "$DIR/llama-server" ]; then
    "$PYTHON" -m pip download --no-deps --no-binary :all: -d "$DIR" "llama-cpp-python==$VERSION"
    tar -xzf "$DIR/llama_cpp_python-$VERSION.tar.gz" -C "$DIR"
    SOURCE="$DIR/llama_cpp_python-$VERSION/vendor/llama.cpp"
    cmake -S "$SOURCE" -B "$DIR/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
    cmake --build "$DIR/build" --target llama-server --parallel "$(nproc)"
    cp "$DIR/build/bin/llama-server" "$DIR/llama-server"
fi
"$DIR/llama-server" --version
