#!/usr/bin/env bash
# The case `wan-small` in PyTorch and here, in turn, on two threads each; prints a Markdown table.
#
#   scripts/bench.sh [VENV]     default: target/bench-venv; torch, diffusers and peft are installed into it if missing
#
# Measure on a quiet machine. ROUNDS=1 is a quick look.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-target/bench-venv}
rounds=${ROUNDS:-3}
cases="denoise-cfg denoise-cfg@512 train train@512" # @512: prompts that fill the context, else 12 real rows of 512
export RAYON_NUM_THREADS=2 OMP_NUM_THREADS=2 MKL_NUM_THREADS=2

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/python" -c 'import torch, diffusers, peft' 2>/dev/null || "$venv/bin/python" -m pip install --quiet torch diffusers peft
rust=target/release/examples/bench_wan_small
cargo build --release --workspace --example bench_wan_small

results=$(mktemp)
trap 'rm -f "$results"' EXIT
for round in $(seq "$rounds"); do
  for case in $cases; do
    echo "round $round of $rounds: $case" >&2
    result=$("$venv/bin/python" scripts/bench_pytorch.py "${case%@*}")
    echo "pytorch $case $result" >>"$results"
    rows=${case#*@}
    [ "$rows" != "$case" ] || rows=12
    result=$("$rust" "${case%@*}" --text-rows "$rows" --json)
    echo "rust $case $result" >>"$results"
  done
done

"$venv/bin/python" - "$results" <<'PYTHON'
import json, os, statistics, sys
from collections import defaultdict

results = defaultdict(list)
for line in open(sys.argv[1]):
    side, case, result = line.split(" ", 2)
    results[case, side].append(json.loads(result))


def median_of(rounds, key):
    return statistics.median(result[key] for result in rounds)


def summary(rounds):
    """Over all runs of all rounds: median and fastest in milliseconds; median of the peak memories in MiB."""
    runs = [seconds * 1e3 for result in rounds for seconds in result["runs"]]
    return statistics.median(runs), min(runs), median_of(rounds, "peak_rss_mib")


cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
torch = results["train", "pytorch"][0]["torch"]
print(f"PyTorch {torch}, {cpu}, 2 threads; load at the end {os.getloadavg()[0]:.1f}\n")
print("| case | PyTorch median (min) ms | flash-grpo median (min) ms | times faster | PyTorch peak MiB (its import) | flash-grpo peak MiB | times smaller |")
print("|---|---|---|---|---|---|---|")
for case in dict.fromkeys(case for case, _ in results):
    (t, t_min, t_mib), (r, r_min, r_mib) = summary(results[case, "pytorch"]), summary(results[case, "rust"])
    import_mib = median_of(results[case, "pytorch"], "import_rss_mib")
    print(f"| {case} | {t:.0f} ({t_min:.0f}) | {r:.0f} ({r_min:.0f}) | {t / r:.2f} | {t_mib:.0f} ({import_mib:.0f}) | {r_mib:.0f} | {t_mib / r_mib:.1f} |")
PYTHON
