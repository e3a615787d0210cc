#!/usr/bin/env bash
# Build llama.cpp's llama-server, the other peer of benchmarks/cpu_serve.py. Needs cmake, a C++ compiler and pip.
#
#   benchmarks/peers/setup_llama_cpp.sh [DIR]        default: build/llama.cpp
#
# The sources come from the package registry: the source distribution of llama-cpp-python contains them. Where
# OpenBLAS is installed (libopenblas-openmp-dev, pkg-config), a second build, llama-server-openblas, uses it for
# prompts.
# Then: python -m benchmarks.cpu_serve --engines ...,llama.cpp --llama-server DIR/llama-server
set -euo pipefail

VERSION=0.3.36
DIR=${1:-build/llama.cpp}
PYTHON=${PYTHON:-python3}
SOURCE="$DIR/llama_cpp_python-$VERSION/vendor/llama.cpp"

# build NAME OPTION...: builds the sources with these options, and copies the program to DIR/NAME.
build() {
    local name=$1
    shift
    if [ ! -x "$DIR/$name" ]; then
        cmake -S "$SOURCE" -B "$DIR/build-$name" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
            -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "$@"
        cmake --build "$DIR/build-$name" --target llama-server --parallel "$(nproc)"
        cp "$DIR/build-$name/bin/llama-server" "$DIR/$name"
    fi
    "$DIR/$name" --version
}

mkdir -p "$DIR"
if [ ! -d "$SOURCE" ]; then
    "$PYTHON" -m pip download --no-deps --no-binary :all: -d "$DIR" "llama-cpp-python==$VERSION"
    tar -xzf "$DIR/llama_cpp_python-$VERSION.tar.gz" -C "$DIR"
fi
build llama-server
if pkg-config --exists openblas; then
    build llama-server-openblas -DGGML_BLAS=ON -DGGML_BLAS_VENDOR=OpenBLAS
fi
