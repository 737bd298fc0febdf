#!/usr/bin/env bash
# On another device than the CPU: what `doctor` says, the golden tests of the small models, and one iteration of training through the program.
#
#   scripts/gpu_ci.sh [DEVICE]     as `--device` names it; default: wgpu
#
# Where there is no GPU, `vulkan` and `wgpu` mean Mesa's software driver, which computes on the processor (Debian and Ubuntu: mesa-vulkan-drivers
# libvulkan1, installed here if that is allowed; exit code 3 where neither is there). The engine is built once more for the device.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-wgpu}
feature=${device%%:*}
export CARGO_INCREMENTAL=0 FLASH_GRPO_TEST_DEVICE=$device
work=$(mktemp -d)
cp Cargo.lock "$work/Cargo.lock"
trap 'cp "$work/Cargo.lock" Cargo.lock; rm -rf "$work"' EXIT
config=()

has_vulkan() { # servers have a render node, and nothing that speaks to it
    compgen -G '/dev/dri/renderD*' >/dev/null && ldconfig -p 2>/dev/null | grep -q 'libvulkan\.so\.1' &&
        ls /usr/share/vulkan/icd.d/*.json /etc/vulkan/icd.d/*.json 2>/dev/null | grep -qv lvp_
}
if { [ "$feature" = vulkan ] || [ "$feature" = wgpu ]; } && ! has_vulkan; then
    driver=(/usr/share/vulkan/icd.d/lvp_icd.*.json)
    if [ ! -e "${driver[0]}" ]; then
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends mesa-vulkan-drivers libvulkan1; } >/dev/null 2>&1 || true
        driver=(/usr/share/vulkan/icd.d/lvp_icd.*.json)
    fi
    if [ ! -e "${driver[0]}" ]; then
        echo "no GPU, and no software driver could be installed: nothing was tested" >&2
        exit 3
    fi
    # the new name of the variable and the old one
    export VK_DRIVER_FILES=${driver[0]} VK_ICD_FILENAMES=${driver[0]} XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-$work}
    # cubecl-spirv 0.11.3 swaps two types where a driver lacks VK_KHR_workgroup_memory_explicit_layout, as the software driver does: every matrix
    # product then crashes it. The release has no fix, so a copy is built with the two words exchanged.
    if [ "$feature" = vulkan ]; then
        cargo fetch
        cp -r "$(ls -d "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/cubecl-spirv-0.11.3 | head -1)" "$work/cubecl-spirv"
        memory=$work/cubecl-spirv/src/ops/memory.rs
        sed -i 's/GlobalVariableOp::new(ctx, value_ty, StorageClass::Workgroup, name.clone(), None)/GlobalVariableOp::new(ctx, ty, StorageClass::Workgroup, name.clone(), None)/; s/AddressOfOp::new(ctx, ty, name)/AddressOfOp::new(ctx, value_ty, name)/' "$memory"
        grep -q 'AddressOfOp::new(ctx, value_ty, name)' "$memory"
        config=(--config "patch.crates-io.cubecl-spirv.path='$work/cubecl-spirv'")
    fi
fi

# one build of the engine for all that follows
build=(--profile device --workspace --features "flash-grpo/$feature" ${config[@]+"${config[@]}"})
tests=(--test attention --test transformer --test vae --test text --test solver --test pipeline --test image_to_video --test reference_update)
program=${CARGO_TARGET_DIR:-target}/device/flash-grpo
cargo build "${build[@]}" --bin flash-grpo
# the tests of `device` (in the library) ask for every backend
cargo test "${build[@]}" --lib -- device::
cargo test "${build[@]}" "${tests[@]}" --no-fail-fast -- --test-threads 1 matches_reference half_precision attention_backward collapsed_padding on_policy_ratio
"$program" doctor
"$program" train --device "$device" --output-dir "$work/run" --set train.iterations=1 --set rollout.prompts_per_iteration=2 \
    --set eval.num_prompts=2 --set eval.samples_per_prompt=1 --set eval.videos=1
