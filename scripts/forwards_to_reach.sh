#!/usr/bin/env bash
# docs/reproduce.md, "Forwards to reach what the full trajectory ends with": 70 iterations of the full trajectory and of Flash-GRPO with its savings, five
# seeds, evaluated on the way. About 50 minutes of one core.
#
#   scripts/forwards_to_reach.sh [FOLDER]        default: runs/forwards
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-runs/forwards}
cargo build --release --workspace
for seed in 1 2 3 4 5; do
    for run in flow-grpo:10 flash-grpo-suffix-2:5; do
        name=${run%:*}
        [ -f "$folder/$name/seed-$seed/summary.json" ] && continue
        target/release/flash-grpo train "recipes/moving_shapes/$name.toml" --seed "$seed" --set train.iterations=70 --set "eval.every=${run#*:}" \
            --set eval.samples_per_prompt=4 --set eval.videos=0 --output-dir "$folder/$name/seed-$seed"
    done
done
