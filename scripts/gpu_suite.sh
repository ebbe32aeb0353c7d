#!/usr/bin/env bash
# Runs everything that needs a GPU, in sections with a time limit each, and prints a summary of all.
#
#   scripts/gpu_suite.sh [FOLDER [SECTION...]]
#
# Results are in FOLDER (default: outputs/gpu_suite). A section that has succeeded there is not run again, so that the suite
# can be run in parts and resumed; delete SECTION.done to repeat one. Sections (default: all):
#   tests       GPU tests, 4 min                            peers       against other programs, eager and compiled, 8 min
#   eager       trainer against the plain loop, 5 min       checkpoint  cost of saves, 4 min
#   compiled    the same compiled, 6 min                    experts     a layer of experts, 2 min
#   parallel    two GPUs: cost of each axis, 6 min          memory      predicted and reserved memory, 6 min
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
PYTHON="${PYTHON:-python3}"
FOLDER="${1:-outputs/gpu_suite}"
SECTIONS=(tests eager compiled peers checkpoint experts parallel memory)
[ $# -lt 2 ] || SECTIONS=("${@:2}")
mkdir -p "$FOLDER"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
MODEL=(--model.args.dim=2048 --model.args.n_layers=8 --model.args.n_heads=16 --model.args.n_kv_heads=8
    --model.args.vocab_size=32768 --training.seq_len=2048 --training.local_batch_size=8 --training.loss_chunk_tokens=4096)
TRAINER=(benchmarks/trainer.py --rounds 3 --steps 15 --dtype bfloat16)
PEERS=(benchmarks/peers.py --device cuda --size 120M --dtype bfloat16)

run() { # SECTION SECONDS ARGUMENTS...: runs Python with the arguments, its output in a file of the section
    local section="$1" seconds="$2" code
    shift 2
    timeout "$seconds" "$PYTHON" "$@" >>"$FOLDER/$section.txt" 2>>"$FOLDER/$section.err"
    code=$?
    [ $code != 124 ] || echo "stopped after $seconds s" >>"$FOLDER/$section.txt"
    return $code
}

run_section() {
    case "$1" in
    tests) run tests 240 -m pytest tests/gpu tests/ops/test_blockwise_attention.py tests/models/test_attention.py tests/data/test_packing.py ;;
    eager) run eager 300 "${TRAINER[@]}" --json "$FOLDER/eager.json" -- "${MODEL[@]}" ;;
    compiled) run compiled 360 "${TRAINER[@]}" --compile --json "$FOLDER/compiled.json" -- "${MODEL[@]}" ;;
    peers)
        run peers 200 "${PEERS[@]}" --json "$FOLDER/peers.json" &&
            run peers 280 "${PEERS[@]}" --compile --json "$FOLDER/peers_compiled.json"
        ;;
    checkpoint) run checkpoint 240 benchmarks/checkpoint.py --rows=4096 ;;
    experts) run experts 120 benchmarks/experts.py --device=cuda --dtype=bfloat16 --tokens=16384 ;;
    parallel)
        [ "$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ] || return 0
        run parallel 360 benchmarks/parallel.py -- "${MODEL[@]}" --training.local_batch_size=2
        ;;
    memory) run memory 360 benchmarks/memory.py --device=cuda ;;
    *)
        echo "error: no section $1; the sections are listed in $0" >&2
        exit 2
        ;;
    esac
}

for section in "${SECTIONS[@]}"; do
    [ ! -e "$FOLDER/$section.done" ] || continue
    rm -f "$FOLDER/$section.txt" "$FOLDER/$section.err"
    run_section "$section" && touch "$FOLDER/$section.done"
done
echo "=== $(date -u +%F) $("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name())')"
for section in "${SECTIONS[@]}"; do
    [ -f "$FOLDER/$section.txt" ] || continue
    echo "--- $section$([ -e "$FOLDER/$section.done" ] || echo ": FAILED")"
    tail -n 40 "$FOLDER/$section.txt"
    tail -n 3 "$FOLDER/$section.err"
done
