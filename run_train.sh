#!/usr/bin/env bash
# Trains a model: creates .venv on first use, then starts one process per GPU (one CPU process if there is none).
#
#   ./run_train.sh
#   CONFIG_FILE=my.toml NGPU=2 ./run_train.sh --training.steps=20 --optimizer.lr=1e-3
#
# Arguments override options of the TOML file; --help lists all options. Environment variables:
#   NGPU         number of processes on this node (default: number of GPUs, or 1)
#   CONFIG_FILE  TOML file (default: train_configs/debug_model.toml); --job.config_file=FILE takes precedence
#   COMM_MODE    "fake_backend": simulate NGPU processes in one, and print their memory and collectives
#   TRAIN_FILE   module to start instead of torchtitan_clone.train, which calls that (see docs/extending.md)
#   LOG_RANK     local ranks whose output is shown (default: 0), for example 0,1
#   LOG_FOLDER   folder that keeps the output of the other ranks (default: a temporary folder if the run fails)
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   multi-node training: run this script on each node
#   PYTHON       Python interpreter (default: see scripts/setup_env.sh)
#   NO_SETUP=1   do not check or install packages
#   ALLOCATOR    "default": allocate CPU tensors by malloc, not in a region of their own
# Relative paths are relative to the working directory.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/scripts/setup_env.sh"

count_gpus() {
    local present listed
    present=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' 2>/dev/null | wc -l)
    if [ "$present" = 0 ] && command -v nvidia-smi >/dev/null; then
        present=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
    elif [ "$present" = 0 ] && [ -e /dev/kfd ]; then # AMD
        present=$(find /dev/dri -name 'renderD*' | wc -l)
    fi
    case "${CUDA_VISIBLE_DEVICES-all}" in
    all) listed=$present ;;
    "" | -1) listed=0 ;;
    *) listed=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l) ;;
    esac
    echo $((listed < present ? listed : present))
}

has_argument() { # NAME ARGUMENTS...: succeeds if NAME or NAME=VALUE is among ARGUMENTS
    local name="$1" argument
    shift
    for argument in "$@"; do
        case "$argument" in "$name" | "$name"=*) return 0 ;; esac
    done
    return 1
}

is_simulated() { # ARGUMENTS...: succeeds if they ask for a run without other processes
    [[ " $* " == *" --comm.mode"[=\ ]"fake_backend "* || " $* " == *" --job.dry_run"[=\ ]"true "* ]]
}

if has_argument --help "$@" || has_argument -h "$@"; then # needs no package
    exec "${PYTHON:-$(base_python || echo python3)}" -m torchtitan_clone.train "$@"
fi
[ "$(uname)" = Linux ] || fail "$(uname) is not supported: processes use interfaces of Linux (/proc, CPU affinity, \
signals, shared memory); use Linux, for example in a container or virtual machine, or WSL 2 on Windows"
case "${COMM_MODE:-default}" in
default) ;;
fake_backend) set -- "$@" --comm.mode=fake_backend ;;
local_tensor) fail "COMM_MODE = local_tensor: is not supported; set it to fake_backend to simulate, or unset it to start \
NGPU processes, which need no GPUs" ;;
*) fail "COMM_MODE = $COMM_MODE: must be default or fake_backend; change or unset it" ;;
esac
TRAIN_FILE="${TRAIN_FILE:-torchtitan_clone.train}"
case "$TRAIN_FILE" in
torchtitan.* | torchtitan) fail "TRAIN_FILE = $TRAIN_FILE: belongs to torchtitan; unset it" ;;
*/* | *.py | -*) fail "TRAIN_FILE = $TRAIN_FILE: must be a module, such as my_package.train, which python -m starts" ;;
esac
if [ -z "${CONFIG_FILE:-}" ] && [ -n "${MODULE:-}" ] && [ -n "${CONFIG:-}" ]; then
    say "MODULE and CONFIG of torchtitan are not read; set CONFIG_FILE to a TOML file"
fi
setup_env ""
NNODES="${NNODES:-1}"
case "${ALLOCATOR:-default}" in default) ;; *) fail "ALLOCATOR = $ALLOCATOR: must be default; change or unset it" ;; esac
if [ -z "${NGPU:-}" ]; then
    NGPU="$(count_gpus)"
    [ "$NGPU" != 0 ] || NGPU=1
fi
for name in NGPU NNODES; do
    [[ "${!name}" =~ ^[1-9][0-9]{0,5}$ ]] || fail "$name = ${!name}: must be an integer of at least 1; change or unset it"
done
has_argument --job.config_file "$@" ||
    set -- "--job.config_file=${CONFIG_FILE:-$REPO/train_configs/debug_model.toml}" "$@"

if [ "$NGPU" = 1 ] && [ "$NNODES" = 1 ]; then
    exec "$PYTHON" -m "$TRAIN_FILE" "$@"
fi
if has_argument --dry-run "$@" || is_simulated "$@"; then # these need no other process
    WORLD_SIZE=$((NGPU * NNODES)) exec "$PYTHON" -m "$TRAIN_FILE" "$@"
fi
if [ "$NNODES" != 1 ]; then
    [ -n "${NODE_RANK:-}" ] ||
        fail "NNODES = $NNODES and NODE_RANK is not set; set it to the index of this node, from 0"
    [ -n "${MASTER_ADDR:-}" ] ||
        fail "NNODES = $NNODES and MASTER_ADDR is not set; set it to the address of the node with NODE_RANK 0"
    set -- --nnodes="$NNODES" --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" \
        --master-port="${MASTER_PORT:-29500}" "$@"
fi
[ "$TRAIN_FILE" = torchtitan_clone.train ] || set -- --train-file="$TRAIN_FILE" "$@"
[ -z "${LOG_FOLDER:-}" ] || set -- --log-folder="$LOG_FOLDER" "$@"
exec "$PYTHON" -m torchtitan_clone.launch.torchrun --nproc-per-node="$NGPU" --log-rank="${LOG_RANK:-0}" "$@"
