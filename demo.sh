#!/usr/bin/env bash
# The whole line on a tiny random-weight K3.1: make, extract, measure and place on three directories, verify, generate.
set -euo pipefail
bin=$1
out=$2

step() { printf '\n== %s\n' "$*"; }
run() { printf '$ %s\n' "$*"; "$bin/$1" "${@:2}"; }

rm -rf "$out"
mkdir -p "$out/nvme0" "$out/nvme1" "$out/nvme2"

step "1. A checkpoint in the published format, with random weights (it will answer gibberish)"
run kprep make-tiny "$out/checkpoint" --geometry tiny --seed 1
step "2. Extract: the spine as GGUF, one file per expert, hashes, manifest"
run kprep extract "$out/checkpoint" "$out/model"
step "3. Measure three directories that stand in for drives, and place the experts on them"
run kprep place "$out/model/manifest.yaml" --tier "A=$out/nvme0" --tier "B=$out/nvme1" --tier "C=$out/nvme2" \
    --measure-drives --measure-seconds 0.2 --limit C=500KB
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

printf '\nAll of it is in %s; remove it with make clean.\n' "$out"
