#!/usr/bin/env bash
# One file with all that measuring an NVIDIA GPU needs beside its driver: the programs built for CUDA, the compiler of their kernels, the CUDA headers.
#
#   scripts/cuda_bundle.sh [FILE]     default: target/flash-grpo-cuda.tar.xz
#
# NVRTC, two thirds of it, can stay behind where a CUDA 13 toolkit is installed: WITH_NVRTC=0. The driver there has to be of version 580 or newer.
# On the machine with the GPU, in a checkout of the repository: FLASH_GRPO_BIN=FILE scripts/measure_gpu.sh cuda
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/cuda_toolchain.sh
file=${1:-$target/flash-grpo-cuda.tar.xz}

cargo build "${cuda_build[@]}" --bin flash-grpo --example rehearse --features flash-grpo/cuda-cpp
mkdir -p "$work/bundle/cuda/lib"
strip -o "$work/bundle/flash-grpo" "$target/device/flash-grpo"
strip -o "$work/bundle/rehearse" "$target/device/examples/rehearse"
if [ "${WITH_NVRTC:-1}" != 0 ]; then
    cp "$toolkit"/lib/libnvrtc.so.13 "$toolkit"/lib/libnvrtc-builtins.so.13.* "$work/bundle/cuda/lib"
    # the first name that the programs look for: without it, they would take an installed NVRTC of another version to these headers
    ln -s libnvrtc.so.13 "$work/bundle/cuda/lib/libnvrtc.so"
fi
cp -r "$toolkit/include" "$work/bundle/cuda/include"
# both programs are mostly the same engine: a dictionary that reaches from one to the other halves the file
tar -C "$work/bundle" -c flash-grpo rehearse cuda | xz -T1 --lzma2=preset=6,dict=512MiB >"$file"
echo "$file: $(du -m "$file" | cut -f1) MiB"
