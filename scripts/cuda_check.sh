#!/usr/bin/env bash
# Without a GPU: builds for CUDA, and has NVIDIA's own compiler (NVRTC) compile every kernel that an iteration of training generates.
#
#   scripts/cuda_check.sh
#
# The driver is a pretended one that accepts kernels and runs none (tools/cuda_check/driver.c). NVRTC and the CUDA headers come from PyPI. A stand-in takes the
# place of cubecl-llvm, whose build fetches an LLVM bundle that the C++ route does not need (tools/cuda_check/cubecl-llvm).
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
venv=$target/cuda-check-venv
work=$(mktemp -d)
cp Cargo.lock "$work/Cargo.lock"
trap 'cp "$work/Cargo.lock" Cargo.lock; rm -rf "$work"' EXIT

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
for package in nvrtc runtime crt cccl; do packages+=("nvidia-cuda-$package==13.0.*"); done
"$venv/bin/python" -m pip install --quiet "${packages[@]}"
toolkit=$(dirname "$(dirname "$(find "$(realpath "$venv")" -name libnvrtc.so.13 | head -1)")")

# under this name alone: NVRTC asks a libcuda.so.1 for tables that only the real one has
cc -shared -fPIC -O1 -o "$work/libcuda.so" tools/cuda_check/driver.c
cp -r tools/cuda_check/cubecl-llvm "$work/cubecl-llvm" # outside of the workspace, of which it is no part

export CARGO_INCREMENTAL=0 CUDARC_CUDA_VERSION=13000
cargo build --profile device --workspace --example kernels --features train/cuda-cpp --config "patch.crates-io.cubecl-llvm.path='$work/cubecl-llvm'"
CUDA_PATH=$toolkit LD_LIBRARY_PATH=$work:$toolkit/lib CUDA_CHECK_REPORT=1 "$target/device/examples/kernels"
