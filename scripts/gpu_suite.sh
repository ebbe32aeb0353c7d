#!/usr/bin/env bash
# Runs everything that needs a GPU, in sections with a time limit each, and prints a table of all last.
#
#   [WHEELS=WHEEL_FOLDER] scripts/gpu_suite.sh [FOLDER [SECTION...]]
#
# FOLDER (default: outputs/gpu_suite) gets the output of each section, summary.txt, and results.json, which has all figures.
# A section that has succeeded there is not run again, so that the suite can be run in parts, for instance one group below
# at a time, each at most ten minutes, and resumed; delete SECTION.done to repeat one. WHEELS is a folder of packages that
# this machine lacks; they are installed into FOLDER, without a network.
#
#   tests       GPU tests
#   layers      layers of 8B against torchtitan and their bare products
#   model       1B as a whole, also as a CUDA graph, against the same
#   attention   its kernels
#
#   peers       120M, also as a CUDA graph, against other programs, eager and compiled
#   long        131,072 tokens with and without documents
#   experts     a layer of experts
#
#   float8      its recipes against bfloat16
#   memory      predicted and reserved memory
#   checkpoint  cost of saves
#   parallel    cost of each axis, where there are two GPUs
set -uo pipefail
here="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
PYTHON="${PYTHON:-python3}"
case "$PYTHON" in */*) PYTHON="$(realpath -s "$PYTHON")" ;; esac # no link is followed: an environment's Python is one
FOLDER="${1:-$here/outputs/gpu_suite}"
SECTIONS=(tests layers model attention peers long experts float8 memory checkpoint parallel)
for section in "${@:2}"; do
    [[ " ${SECTIONS[*]} " == *" $section "* ]] ||
        { echo "error: no section $section; choose from: ${SECTIONS[*]}" >&2 && exit 2; }
done
[ $# -lt 2 ] || SECTIONS=("${@:2}")
mkdir -p "$FOLDER" && FOLDER="$(readlink -e "$FOLDER")" || exit 2
if [ -n "${WHEELS:-}" ]; then
    [ -d "$WHEELS" ] || { echo "error: WHEELS = $WHEELS: no such folder" >&2 && exit 2; }
    WHEELS="$(readlink -f "$WHEELS")"
fi
cd "$here" || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
PEERS=(benchmarks/peers.py --device=cuda --dtype=bfloat16)
LARGE=(--compile --skip-cold --only ours products torchtitan)
GRAPHS=(--only ours "ours, graph" nanoGPT)
COMPILED=(--model.args.n_kv_heads=8 --model.args.vocab_size=32768 --compile.enable=true
    --training.mixed_precision_param=bfloat16)
WIDE=(--model.args.dim=2048 --model.args.n_layers=8 --model.args.n_heads=16 "${COMPILED[@]}")
WIDEST=(--model.args.dim=4096 --model.args.n_layers=4 --model.args.n_heads=32 "${COMPILED[@]}")
FLOAT8="'--model.converters=[\"float8\"]'"

if [ -n "${WHEELS:-}" ]; then
    packages="$FOLDER/site-packages"
    "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$packages" "$WHEELS"/*.whl || exit 2
    export PYTHONPATH="$PYTHONPATH:$packages" PIP_FIND_LINKS="$WHEELS" PIP_NO_INDEX=1 # for the peers
fi

run() { # SECTION SECONDS ARGUMENTS...: runs Python with the arguments, its output in a file of the section
    local section="$1" seconds="$2" code
    shift 2
    timeout --foreground --signal=INT --kill-after=5 "$seconds" "$PYTHON" "$@" >>"$FOLDER/$section.txt" 2>>"$FOLDER/$section.err"
    code=$?
    [ $code != 124 ] || echo "stopped after $seconds s" >>"$FOLDER/$section.txt"
    return $code
}

skip() { # SECTION REASON: as a failure, is tried again the next time
    echo "not run: $2" | tee "$FOLDER/$1.txt" >"$FOLDER/$1.err"
    return 1
}

run_section() {
    case "$1" in
    tests)
        # Compilation by processes of each of the workers would start dozens of interpreters.
        TORCHINDUCTOR_COMPILE_THREADS=1 run tests 150 -m pytest -n 8 -v tests/gpu tests/ops/test_blockwise_attention.py tests/ops/test_adam_kernel.py \
            tests/models/test_attention.py tests/data/test_packing.py
        ;;
    layers) run layers 130 "${PEERS[@]}" --size=8B-layers "${LARGE[@]}" --json="$FOLDER/layers.json" ;;
    model) run model 130 "${PEERS[@]}" --size=1B "${LARGE[@]}" "ours, graph" --json="$FOLDER/model.json" ;;
    peers)
        run peers 110 "${PEERS[@]}" --size=120M --json="$FOLDER/peers.json" "${GRAPHS[@]}" "plain loop" &&
            run peers 130 "${PEERS[@]}" --size=120M --json="$FOLDER/peers_compiled.json" --compile --skip-cold "${GRAPHS[@]}"
        ;;
    long)
        run long 120 benchmarks/variants.py documents= causal=--training.document_masking=false --rounds=3 \
            --json="$FOLDER/long.json" -- "${WIDE[@]}" --training.seq_len=131072 --model.args.max_seq_len=131072 \
            --training.local_batch_size=1 --activation_checkpoint.mode=full
        ;;
    float8)
        if ! "$PYTHON" -c "import torchao" 2>/dev/null; then
            skip float8 "torchao is not installed"
            return
        fi
        run float8 200 benchmarks/variants.py bfloat16= tensorwise="$FLOAT8" \
            rowwise="$FLOAT8 --quantize.linear.float8.recipe_name=rowwise" \
            --json="$FOLDER/float8.json" -- "${WIDEST[@]}" --training.seq_len=4096 --training.local_batch_size=2
        ;;
    memory) run memory 160 tests/campaigns/memory.py --device=cuda ;;
    checkpoint) run checkpoint 180 benchmarks/checkpoint.py --rows=65536 --folder=/dev/shm ;;
    attention)
        run attention 55 benchmarks/attention.py --device=cuda --dtype=bfloat16 &&
            run attention 55 benchmarks/attention.py --device=cuda --dtype=bfloat16 --document-length=2000
        ;;
    experts) run experts 60 benchmarks/experts.py --device=cuda --dtype=bfloat16 --tokens=16384 ;;
    parallel)
        if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" -lt 2 ]; then
            skip parallel "it needs two GPUs"
            return
        fi
        run parallel 360 benchmarks/parallel.py -- "${WIDE[@]}" --training.seq_len=2048 --training.local_batch_size=2
        ;;
    esac
}

trap 'exit 130' INT
for section in "${SECTIONS[@]}"; do
    [ ! -e "$FOLDER/$section.done" ] || continue
    rm -f "$FOLDER/$section".{txt,err,json} "$FOLDER/$section"_*.json
    SECONDS=0
    run_section "$section" && echo $SECONDS >"$FOLDER/$section.done"
done
"$PYTHON" benchmarks/gpu_results.py "$FOLDER" | tee "$FOLDER/summary.txt"
