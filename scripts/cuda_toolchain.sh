# Sourced by the scripts that build for CUDA on a machine without a GPU, in the root of the repository. Sets
#
#   toolkit          folder with NVIDIA's compiler (NVRTC) and the CUDA headers, from PyPI
#   work             a temporary folder
#   cuda_build       arguments of `cargo build`
#
# A stand-in takes the place of cubecl-llvm, whose build fetches an LLVM bundle that the C++ route does not need (tools/cuda_check/cubecl-llvm).
target=${CARGO_TARGET_DIR:-target}
venv=$target/cuda-check-venv
work=$(mktemp -d)
cp Cargo.lock "$work/Cargo.lock"
trap 'cp "$work/Cargo.lock" Cargo.lock; rm -rf "$work"' EXIT

"$venv/bin/python" -m pip --version >/dev/null 2>&1 || python3 -m venv --clear "$venv"
packages=()
for package in nvrtc runtime crt cccl; do packages+=("nvidia-cuda-$package==13.0.*"); done
"$venv/bin/python" -m pip install --quiet "${packages[@]}"
toolkit=$(dirname "$(dirname "$(find "$(realpath "$venv")" -name libnvrtc.so.13 | head -1)")")

# outside of the workspace, of which it is no part; always in the same place, so that the engine is not built anew
standin=$(realpath "$target")/cuda-check-standin/cubecl-llvm
mkdir -p "$(dirname "$standin")"
rm -rf "$standin"
cp -rp tools/cuda_check/cubecl-llvm "$standin"
export CARGO_INCREMENTAL=0 CUDARC_CUDA_VERSION=13000
cuda_build=(--profile device --workspace --config "patch.crates-io.cubecl-llvm.path='$standin'")
