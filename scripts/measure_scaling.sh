#!/usr/bin/env bash
# The measurements of docs/scaling.md, one after the other; needs 24 GiB of memory, 15 GB of disk and a quiet machine. Prints JSON lines.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --workspace --all-targets
bin=target/release
model=models/Wan2.1-T2V-1.3B-Random
[ -d $model ] || $bin/flash-grpo random-model $model --size 1.3b
echo '# activation checkpointing'
for guidance in 1.0 4.5; do
  $bin/examples/measure_update --size 1.3b --layers 8 --tokens 1024 --guidance $guidance
  $bin/examples/measure_update --size 1.3b --layers 8 --tokens 1024 --guidance $guidance --activation-checkpointing
done
echo '# one block of the 14B shape'
for tokens in 1024 2048 4096 8192; do $bin/examples/measure_update --size 14b --layers 1 --tokens $tokens; done
echo '# one update of the 1.3B architecture, twice: the second time without the text encoder'
for _ in 1 2; do $bin/examples/rehearse recipes/rehearse_wan_1_3b_cpu.toml; done
$bin/examples/rehearse recipes/rehearse_wan_1_3b_cpu.toml train.activation_checkpointing=false
