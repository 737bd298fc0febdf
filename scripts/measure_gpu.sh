#!/usr/bin/env bash
# What a GPU does at full size: Wan2.1 1.3B with random weights, 81 frames of 480x832, the published LoRA. Prints JSON lines: seconds and GiB of loading,
# rollout, decoding and update beside what `plan` says, operations a second, and their share of the card's own matrix rate.
#
#   scripts/measure_gpu.sh [DEVICE] [KEY=VALUE ..]     DEVICE as `--device` names it; default: cuda
#
# Needs 15 GB of disk. FLASH_GRPO_BIN names a folder with `flash-grpo` and `rehearse` built elsewhere for the device, or a file of scripts/cuda_bundle.sh;
# without it they are built here. Such a file needs an NVIDIA driver of version 580 or newer, which knows what its NVRTC 13.0 writes (PTX 9.0).
# FLASH_GRPO_MODEL is another model folder, PRECISIONS a part of "bf16 no".
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-cuda}
bin=${FLASH_GRPO_BIN:-}
if [ -f "$bin" ]; then
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -1) || driver=
    if [ "${device%%:*}" = cuda ] && [[ $driver =~ ^([0-9]+)\. ]] && [ "${BASH_REMATCH[1]}" -lt 580 ]; then
        echo "the NVIDIA driver is $driver, and kernels of $bin need 580 or newer: update the driver" >&2
        exit 1
    fi
    unpacked=$(mktemp -d)
    trap 'rm -rf "$unpacked"' EXIT
    tar -C "$unpacked" -xJf "$bin"
    bin=$unpacked
    # its own NVRTC, else that of an installed toolkit
    export LD_LIBRARY_PATH=$bin/cuda/lib:${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}${CUDA_PATH:-/usr/local/cuda}/lib64 CUDA_PATH=$bin/cuda
elif [ -z "$bin" ]; then
    bin=${CARGO_TARGET_DIR:-target}/release
    feature=${device%%:*}
    [ "$feature" = cuda ] && feature=cuda-cpp # whose kernels are checked
    cargo build --release --workspace --features "flash-grpo/$feature" --bin flash-grpo --example rehearse
    cp "$bin/examples/rehearse" "$bin/rehearse"
fi
model=${FLASH_GRPO_MODEL:-models/Wan2.1-T2V-1.3B-Random}
[ -d "$model" ] || "$bin/flash-grpo" random-model "$model" --size 1.3b
"$bin/flash-grpo" doctor || echo "# what doctor says comes first: the figures are of a device that computes otherwise than the CPU"
# two rollouts of 4 steps: a step costs the same in a rollout of 20
run=(model.path="$model" prompts.train=shapes:train prompts.eval=shapes:held-out sampling.num_inference_steps=4
    'method.stochastic={ type = "random", count = 1, pool = 2 }' rollout.prompts_per_iteration=1 rollout.group_size=2 rollout.shared_prefix=false
    train.updates_per_iteration=1 'reward=[{ type = "shapes" }]')
for precision in ${PRECISIONS:-bf16 no}; do
    echo "# train.mixed_precision = \"$precision\""
    "$bin/rehearse" --device "$device" recipes/flash_grpo_wan_1_3b.toml "${run[@]}" train.mixed_precision="$precision" "${@:2}"
done
