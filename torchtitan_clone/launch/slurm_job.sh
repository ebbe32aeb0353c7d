#!/usr/bin/env bash
# Runs a job of `submit`: starts training on every node, and requeues the job if steps remain.
#
# Requeues a run that was stopped by a signal or its time limit, or that failed; not a run that is complete, has an
# invalid configuration, was cancelled, or has started too often without a new checkpoint. After a node failure or a
# preemption Slurm requeues the job by itself.
set -uo pipefail

# The id of one array task equals the array's id, which scontrol would apply to all tasks.
JOB="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"

say() { echo "job $JOB: $*"; }

# Prints the latest committed step, or 0.
latest_step() {
    { echo 0; find -H "$CHECKPOINTS" -maxdepth 1 -name 'step-*' 2>/dev/null | sed -n 's/.*step-\([0-9]*\)$/\1/p'; } |
        sort -n | tail -n 1
}

# Prints an address of this node, the first of the job, that the other nodes can reach.
master_address() {
    local nodes hosts
    nodes=$(scontrol show node "$SLURM_JOB_NODELIST" --oneliner)
    hosts=$(grep -o 'NodeHostName=[^ ]*' <<<"$nodes" | sort -u | wc -l)
    [ "$hosts" != 1 ] || { echo 127.0.0.1 && return; }
    {
        getent ahosts "$(grep -o "^NodeName=$SLURMD_NODENAME .*" <<<"$nodes" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)"
        hostname -I | tr ' ' '\n'
    } | awk '!found && $1 && $1 !~ /^127\.|^::1$/ { print $1; found = 1 } END { exit !found }'
}

# Succeeds unless Slurm is terminating the job, for example after scancel.
may_requeue() {
    local state
    state=$(scontrol show job "$JOB" --oneliner | sed 's/.* JobState=\([A-Z_]*\) Reason=\([^ ]*\) .*/\1 \2/')
    case "$state" in
    RUNNING\ * | *\ TimeLimit) return 0 ;;
    *) say "not requeued: Slurm is terminating the job ($state)" && return 1 ;;
    esac
}

REPO=$(dirname "$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")")
[ ! -e "$REPO/run_train.sh" ] || export PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}" # this checkout, not an installed copy
export NNODES="$SLURM_JOB_NUM_NODES"
export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 12000))}"
export LOGS="$RUN_FOLDER/slurm/$JOB.${SLURM_RESTART_COUNT:-0}"
export INVALID_FILE="$LOGS/invalid" # created by a launcher that exits with 2
mkdir -p "$LOGS" && rm -f "$INVALID_FILE"
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-}"
[ -n "$SRUN_CPUS_PER_TASK" ] || unset SRUN_CPUS_PER_TASK
if [ -z "${MASTER_ADDR:-}" ] && ! MASTER_ADDR=$(master_address); then
    say "$SLURMD_NODENAME has only loopback addresses, which other nodes cannot reach;" \
        "set launch.environment.MASTER_ADDR to its address"
    exit 1
fi
export MASTER_ADDR
STARTS="$RUN_FOLDER/slurm/$JOB.starts"
latest_step >>"$STARTS"
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || set -- "$@" "--fault_tolerance.replica_id=$SLURM_ARRAY_TASK_ID"
say "start $(wc -l <"$STARTS") after step $(tail -n 1 "$STARTS") on $SLURM_JOB_NODELIST," \
    "rendezvous at $MASTER_ADDR:$MASTER_PORT"

trap : HUP TERM USR1 USR2 # this shell must outlive the run
# USR1 must not kill shells and launchers during startup; the launcher installs its own handlers.
# shellcheck disable=SC2016,SC2086 # expanded by the shell on the node; $CONTAINER is split into words
srun --kill-on-bad-exit=1 --cpu-bind=none bash -c '
    trap "" USR1 USR2
    NODE_RANK=$SLURM_NODEID LOG_FOLDER=$LOGS/node$SLURM_NODEID exec "$@"' node \
    ${CONTAINER:-} "${PYTHON:-python3}" -m torchtitan_clone.commands.train "$@"
code=$?
# srun returns the highest code, 75 where other nodes saved as it stopped them. find reads the folder anew on NFS, too.
[ -z "$(find "$LOGS" -maxdepth 1 -name invalid)" ] || code=2

case $code in
0) say "complete" && exit 0 ;;
2) say "not requeued: the configuration is invalid, see the error above" && exit 2 ;;
esac
may_requeue || exit $code
if [ "$(tail -n "$MAX_STARTS_WITHOUT_PROGRESS" "$STARTS" | grep -cx "$(latest_step)")" = "$MAX_STARTS_WITHOUT_PROGRESS" ]; then
    say "not requeued: $MAX_STARTS_WITHOUT_PROGRESS consecutive starts without a checkpoint after step $(latest_step)"
    exit $code
fi
trap '' TERM # scontrol requeue sends it to this shell
say "exit code $code after step $(latest_step); requeued"
scontrol requeue "$JOB"
