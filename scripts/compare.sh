#!/usr/bin/env bash
# The comparison of docs/reproduce.md: every method at one budget over five seeds, with noise shared in the group and with independent noise,
# and what is saved. It goes on where it was broken off.
#
#   scripts/compare.sh [FOLDER]        default: runs/compare; `SEEDS=2 scripts/compare.sh` makes fewer seeds
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-runs/compare}
recipes=recipes/moving_shapes
methods=()
for name in flash-grpo flow-grpo flow-grpo-fast-1 mixgrpo dancegrpo no-itg no-tgr no-itg-no-tgr; do methods+=("$recipes/$name.toml"); done
savings=()
for name in unshared compressed cheapest; do savings+=("$recipes/flash-grpo-$name.toml"); done
options=(--seeds "${SEEDS:-5}" --budget 16000forwards --set eval.samples_per_prompt=4 --set eval.videos=0)
cargo build --release --workspace
target/release/flash-grpo compare "${methods[@]}" "${savings[@]}" "${options[@]}" --output-dir "$folder/shared-noise"
target/release/flash-grpo compare "${methods[@]}" "${options[@]}" --set method.initial_noise=independent --output-dir "$folder/independent-noise"
