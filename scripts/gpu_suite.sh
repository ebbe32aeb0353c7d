#!/usr/bin/env bash
# Runs everything that needs a GPU, in sections with a time limit each, and prints a table of all last.
#
#   [WHEELS=WHEEL_FOLDER] scripts/gpu_suite.sh [FOLDER [SECTION...]]
#
# FOLDER (default: outputs/gpu_suite) gets the output of each section, summary.txt, and results.json, which has all figures.
# A section that has succeeded there is not run again, so that the suite can be run in parts, for instance one line below at
# a time, each at most ten minutes, and resumed; delete SECTION.done to repeat one. With WHEELS, an environment with the
# packages of that folder is made from the Python that runs this, for machines without a network.
#
#   tests       GPU tests, 200 s                              layers     layers of 8B against torchtitan and products, 180 s
#   model       1B as a whole, against the same, 200 s
#   peers       120M against all programs, 290 s              long       131,072 tokens with and without documents, 150 s
#   float8      its recipes against bfloat16, 150 s
#   memory      predicted and reserved memory, 240 s          checkpoint cost of saves, 120 s
#   attention   its kernels, 100 s                            experts    a layer of experts, 100 s
#   parallel    cost of each axis where there are two GPUs, 360 s
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
PYTHON="${PYTHON:-python3}"
FOLDER="${1:-outputs/gpu_suite}"
SECTIONS=(tests layers model peers long float8 memory checkpoint attention experts parallel)
[ $# -lt 2 ] || SECTIONS=("${@:2}")
mkdir -p "$FOLDER"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
PEERS=(benchmarks/peers.py --device=cuda --dtype=bfloat16)
RIVALS=(--compile --only ours products torchtitan)
LAYERS=(--model.args.n_heads=16 --model.args.n_kv_heads=8 --model.args.vocab_size=32768 --compile.enable=true
    --training.mixed_precision_param=bfloat16)
WIDE=("${LAYERS[@]}" --model.args.dim=2048 --model.args.n_layers=8)
FLOAT8="'--model.converters=[\"float8\"]'"

if [ -n "${WHEELS:-}" ]; then
    "$PYTHON" -m venv --without-pip --system-site-packages "$FOLDER/environment" &&
        "$FOLDER/environment/bin/python" -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl || exit 2
    PYTHON="$FOLDER/environment/bin/python"
    WHEELS="$(readlink -f "$WHEELS")"
    export PIP_NO_INDEX=1 PIP_FIND_LINKS="$WHEELS" # for the peers
fi

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
    tests) run tests 200 -m pytest tests/gpu tests/ops/test_blockwise_attention.py tests/models/test_attention.py tests/data/test_packing.py ;;
    layers) run layers 180 "${PEERS[@]}" --size=8B-layers "${RIVALS[@]}" --json="$FOLDER/layers.json" ;;
    model) run model 200 "${PEERS[@]}" --size=1B "${RIVALS[@]}" --json="$FOLDER/model.json" ;;
    peers)
        run peers 110 "${PEERS[@]}" --size=120M --json="$FOLDER/peers.json" &&
            run peers 180 "${PEERS[@]}" --size=120M --compile --json="$FOLDER/peers_compiled.json"
        ;;
    long)
        run long 150 benchmarks/variants.py documents= causal=--training.document_masking=false --rounds=5 \
            --json="$FOLDER/long.json" -- "${WIDE[@]}" --training.seq_len=131072 --training.local_batch_size=1 \
            --activation_checkpoint.mode=full
        ;;
    float8)
        "$PYTHON" -c "import torchao" 2>/dev/null || return 0
        run float8 150 benchmarks/variants.py bfloat16= tensorwise="$FLOAT8" \
            rowwise="$FLOAT8 --quantize.linear.float8.recipe_name=rowwise" \
            --json="$FOLDER/float8.json" -- "${WIDE[@]}" --training.seq_len=4096 --training.local_batch_size=2
        ;;
    memory) run memory 240 benchmarks/memory.py --device=cuda ;;
    checkpoint) run checkpoint 120 benchmarks/checkpoint.py --rows=4096 ;;
    attention)
        run attention 50 benchmarks/attention.py --device=cuda --dtype=bfloat16 &&
            run attention 50 benchmarks/attention.py --device=cuda --dtype=bfloat16 --document-length=2000
        ;;
    experts) run experts 100 benchmarks/experts.py --device=cuda --dtype=bfloat16 --tokens=16384 ;;
    parallel)
        [ "$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ] || return 0
        run parallel 360 benchmarks/parallel.py -- "${WIDE[@]}" --training.seq_len=2048 --training.local_batch_size=2
        ;;
    *)
        echo "error: no section $1; the sections are listed in $0" >&2
        exit 2
        ;;
    esac
}

for section in "${SECTIONS[@]}"; do
    [ ! -e "$FOLDER/$section.done" ] || continue
    rm -f "$FOLDER/$section.txt" "$FOLDER/$section.err"
    SECONDS=0
    run_section "$section" && echo $SECONDS >"$FOLDER/$section.done"
done
"$PYTHON" benchmarks/gpu_results.py "$FOLDER" | tee "$FOLDER/summary.txt"
