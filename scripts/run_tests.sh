#!/usr/bin/env bash
# Runs the tests; arguments are passed to pytest. Installs the test dependencies on first use, like run_train.sh.
# Runs two files at a time: most of a test's time is process startup on one core.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup_env.sh"
setup_env dev,data,wandb,ft,float8,cloud
cd "$REPO"
exec "$PYTHON" -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder "$@"
