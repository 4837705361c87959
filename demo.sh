#!/usr/bin/env bash
# The whole line on a small trained K3.1 (docs/mini.md): extract, measure and place on a disk and in memory, verify, generate, chat, score.
set -euo pipefail
bin=$1
out=$2
checkpoint=$(dirname "$0")/tests/data/mini-k3.1

step() { printf '\n== %s\n' "$*"; }
# A command that can be pasted: what a shell would take apart is quoted.
quoted() {
    local word words=()
    for word; do
        [[ $word =~ ^[A-Za-z0-9_./:=,+-]+$ ]] && words+=("$word") || words+=("${word@Q}")
    done
    printf '%s\n' "${words[*]}"
}
run() { printf '$ %s\n' "$(quoted "$@")"; "$bin/$1" "${@:2}"; }

rm -rf "$out"
mkdir -p "$out/disk"
# Memory stands in for a second, faster device; it is given back at the end.
memory=$(mktemp -d "$([ -w /dev/shm ] && echo /dev/shm || echo "$out")/ktier-demo.XXXXXX")
trap 'rm -rf "$memory"' EXIT

step "1. Extract a checkpoint in the published format: the spine as GGUF, one file per expert, hashes, manifest"
run kprep extract "$checkpoint" "$out/model"
step "2. Measure two drives, this disk and memory that stands in for a faster one, and place the experts on them"
run kprep place "$out/model/manifest.yaml" --tier "A=$memory" --tier "B=$out/disk" --measure-drives --measure-seconds 0.2 --no-fio --limit A=1MB
step "3. Verify every byte"
run kprep verify-hashes "$out/model/manifest.yaml"
step "4. Generate, with room for 60 of the 576 experts on the device and 120 in host memory (so small a model waits for arithmetic, not for drives)"
run krun generate -m "$out/model" -p "Once upon a time there was a kind girl called Mia." -n 160 --vram-cache 60slots --host-pool 120slots
step "5. Ask: each line of the pipe is a turn"
printf 'What is the capital of Iceland?\nWhat is 7 plus 5?\nWhat is the opposite of hot?\n' > "$out/questions"
chat=(chat -m "$out/model" --no-thinking --temp 0 -n 40)
printf '$ %s < %s\n' "$(quoted krun "${chat[@]}")" "$(quoted "$out/questions")"
"$bin/krun" "${chat[@]}" < "$out/questions" > "$out/answers"
paste -d '\n' "$out/questions" "$out/answers"
step "6. What does the Q8_0 spine cost? Compare the logits of a text with those of the unquantised checkpoint
   (KL near 0 is good; the few argmaxes that differ are near-ties; the largest difference is of an unlikely token's logit: docs/mini.md)"
text=(--ids-file "$checkpoint/golden.safetensors" --key 0.text)
run krun score --checkpoint "$checkpoint" "${text[@]}" --out "$out/unquantised.safetensors"
run krun score -m "$out/model" "${text[@]}" --against "$out/unquantised.safetensors"
step "7. Give the memory back: place every expert on the disk alone, so that the model stays whole"
run kprep place "$out/model" --tier "B=$out/disk" --remove-unplanned

printf '\n576 experts lay on two drives, each proved by its hash, with room for 180 of them in memory; the tests show that no bit of a text depends on that.\nThe model is in %s; it knows what docs/mini.md says. To try next:\n  %s\n  %s\nRemove it with: rm -r %s\n' \
    "$out" "$(quoted "$bin/krun" chat -m "$out/model" --temp 0)" "$(quoted "$bin/kprep" verify-hashes "$out/model")" "$(quoted "$out")"
