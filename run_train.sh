#!/usr/bin/env bash
# Trains a model: creates .venv on first use, then starts one process per GPU (one CPU process if there is none).
#
#   ./run_train.sh
#   NGPU=2 ./run_train.sh my.toml --training.steps=20 --optimizer.lr=1e-3
#
# The first argument may be a TOML file, or the name of one in train_configs/. The others override its options; --help
# lists all options. Environment variables, which torchtitan_clone/commands/train.py reads:
#   NGPU         number of processes on this node (default: number of GPUs, or 1)
#   CONFIG_FILE  TOML file (default: train_configs/debug_model.toml); an argument takes precedence
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

for argument in "$@"; do
    case "$argument" in
    --help | -h) exec "${PYTHON:-$(base_python || echo python3)}" -m torchtitan_clone.commands.train "$@" ;; # needs no package
    esac
done
[ "$(uname)" = Linux ] || fail "$(uname) is not supported: processes use interfaces of Linux (/proc, CPU affinity, \
signals, shared memory); use Linux, for example in a container or virtual machine, or WSL 2 on Windows"
setup_env ""
exec "$PYTHON" -m torchtitan_clone.commands.train "$@"
