#!/usr/bin/env bash
# Sets up as run_train.sh does, with what the tests need, and runs them; arguments go to pytest.
# Two files at a time: most of a test's seconds go into starting processes, on one core.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup_env.sh"
setup_env dev,data,wandb,ft
cd "$REPO"
exec "$PYTHON" -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder "$@"
