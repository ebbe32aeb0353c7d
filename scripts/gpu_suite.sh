#!/usr/bin/env bash
# Runs everything that needs a GPU: the GPU tests, the trainer against the plain loop, eager and compiled, and the cost of
# a checkpoint; with two GPUs also the cost of each axis of the mesh.
# Prints a summary at the end; the results are in the folder of the first argument (default: outputs/gpu_suite).
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
PYTHON="${PYTHON:-python3}"
FOLDER="${1:-outputs/gpu_suite}"
mkdir -p "$FOLDER"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" -m pytest tests/gpu tests/ops/test_blockwise_attention.py tests/data/test_packing.py 2>&1 | tee "$FOLDER/tests.log" | tail -n 15
MODEL=(--model.args.dim=2048 --model.args.n_layers=8 --model.args.n_heads=16 --model.args.n_kv_heads=8
    --model.args.vocab_size=32768 --training.seq_len=2048 --training.local_batch_size=8 --training.loss_chunk_tokens=4096)
"$PYTHON" benchmarks/trainer.py --rounds 3 --steps 15 --dtype bfloat16 --json "$FOLDER/eager.json" -- "${MODEL[@]}" \
    >"$FOLDER/eager.txt" 2>"$FOLDER/eager.err"
"$PYTHON" benchmarks/trainer.py --rounds 3 --steps 15 --dtype bfloat16 --compile --json "$FOLDER/compiled.json" -- \
    "${MODEL[@]}" >"$FOLDER/compiled.txt" 2>"$FOLDER/compiled.err"
"$PYTHON" benchmarks/checkpoint.py --rows=4096 >"$FOLDER/checkpoint.txt" 2>"$FOLDER/checkpoint.err"
if [ "$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ]; then
    "$PYTHON" benchmarks/parallel.py -- "${MODEL[@]}" --training.local_batch_size=2 \
        >"$FOLDER/parallel.txt" 2>"$FOLDER/parallel.err"
fi
echo "=== $(date -u +%F) $("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name())')"
tail -n 1 "$FOLDER/tests.log"
for name in eager compiled checkpoint parallel; do
    [ -f "$FOLDER/$name.txt" ] || continue
    echo "--- $name"
    cat "$FOLDER/$name.txt"
    tail -n 3 "$FOLDER/$name.err"
done
