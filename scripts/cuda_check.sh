#!/usr/bin/env bash
# Without a GPU: builds for CUDA, and has NVIDIA's own compiler (NVRTC) compile every kernel that an iteration of training generates.
#
#   scripts/cuda_check.sh
#
# The driver is a pretended one that accepts kernels and runs none (tools/cuda_check/driver.c).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/cuda_toolchain.sh

# under this name alone: NVRTC asks a libcuda.so.1 for tables that only the real one has
cc -shared -fPIC -O1 -o "$work/libcuda.so" tools/cuda_check/driver.c
cargo build "${cuda_build[@]}" --example kernels --features train/cuda-cpp
CUDA_PATH=$toolkit LD_LIBRARY_PATH=$work:$toolkit/lib CUDA_CHECK_REPORT=1 "$target/device/examples/kernels"
