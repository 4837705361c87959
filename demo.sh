#!/usr/bin/env bash
# The whole line on a tiny random-weight K3.1: make, extract, measure and place on a disk and in memory, verify, generate.
set -euo pipefail
bin=$1
out=$2

step() { printf '\n== %s\n' "$*"; }
run() { printf '$ %s\n' "$*"; "$bin/$1" "${@:2}"; }

rm -rf "$out"
mkdir -p "$out/disk"
# Memory stands in for a second, faster device; it is given back at the end.
memory=$(mktemp -d "$([ -w /dev/shm ] && echo /dev/shm || echo "$out")/ktier-demo.XXXXXX")
trap 'rm -rf "$memory"' EXIT

step "1. A checkpoint in the published format, with random weights (it will answer gibberish)"
run kprep make-tiny "$out/checkpoint" --geometry tiny --seed 1
step "2. Extract: the spine as GGUF, one file per expert, hashes, manifest"
run kprep extract "$out/checkpoint" "$out/model"
step "3. Measure two drives, this disk and memory that stands in for a faster one, and place the experts on them"
run kprep place "$out/model/manifest.yaml" --tier "A=$memory" --tier "B=$out/disk" --measure-drives --measure-seconds 0.2 --limit A=1MB
step "4. Verify every byte"
run kprep verify-hashes "$out/model/manifest.yaml"
step "5. Generate, with room for 20 experts on the device and 40 in host memory"
run krun generate -m "$out/model/manifest.yaml" -p "The capital of France is" -n 24 --temp 0 \
    --vram-cache 20slots --host-pool 40slots
step "6. What does the Q8_0 spine cost on this text? Compare with the unquantised checkpoint (random weights: expect it to be large)"
"$bin/python" - "$out/ids.safetensors" <<'PY'
import sys

import numpy as np
from safetensors.numpy import save_file

save_file({"ids": np.arange(40, dtype=np.int64) * 7 % 480}, sys.argv[1])
PY
run krun score --checkpoint "$out/checkpoint" --ids-file "$out/ids.safetensors" --out "$out/unquantised.safetensors"
run krun score -m "$out/model" --ids-file "$out/ids.safetensors" --against "$out/unquantised.safetensors"

step "7. Give the memory back: place every expert on the disk alone, so that the model stays whole"
run kprep place "$out/model" --tier "B=$out/disk"

printf '\nThe model is in %s. To try next:\n  %s\n  %s\nRemove it with: rm -r %s\n' "$out" "$bin/krun chat -m $out/model -n 40" "$bin/kprep verify-hashes $out/model" "$out"
