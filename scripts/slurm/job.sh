#!/usr/bin/env bash
# What a job of submit.py does: starts run_train.sh on every node, and has Slurm start the job again where steps are left.
#
# Requeued are a run that was stopped by a signal or by its time limit, and one that failed; not one that is complete,
# whose configuration is wrong, that scancel ended, or that has started too often without a new checkpoint.
# (Where a node fails, or a job of higher priority takes it, Slurm requeues without asking.)
set -uo pipefail

# Of an array's tasks one has the id of the whole array, by which Slurm would understand all of them.
JOB="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
JOB="${JOB:-$SLURM_JOB_ID}"

say() { echo "job $JOB: $*"; }

# The newest committed step, 0 where there is none.
newest_step() {
    { echo 0; find "$CHECKPOINTS" -maxdepth 1 -name 'step-*' 2>/dev/null | sed -n 's/.*step-\([0-9]*\)$/\1/p'; } |
        sort -n | tail -n 1
}

# An address of this node, which is the first of the job, that the other nodes reach.
master_address() {
    local nodes hosts
    nodes=$(scontrol show node "$SLURM_JOB_NODELIST" --oneliner)
    hosts=$(grep -o 'NodeHostName=[^ ]*' <<<"$nodes" | sort -u | wc -l)
    if [ "$hosts" = 1 ]; then
        echo 127.0.0.1
        return
    fi
    {
        getent ahosts "$(grep -o "^NodeName=$SLURMD_NODENAME .*" <<<"$nodes" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)"
        hostname -I | tr ' ' '\n'
    } | awk '$1 && $1 !~ /^127\.|^::1$/ { print $1; found = 1; exit } END { exit !found }'
}

# Whether Slurm lets the run go on: it is not being cancelled.
may_go_on() {
    local state
    state=$(scontrol show job "$JOB" --oneliner | sed 's/.* JobState=\([A-Z_]*\) Reason=\([^ ]*\) .*/\1 \2/')
    case "$state" in
    RUNNING\ * | *\ TimeLimit) return 0 ;;
    *) say "not requeued: Slurm is ending it ($state)" && return 1 ;;
    esac
}

REPO=$(dirname "$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")")
export NNODES="$SLURM_JOB_NUM_NODES"
export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 12000))}"
export LOGS="$RUN_FOLDER/slurm/$JOB.${SLURM_RESTART_COUNT:-0}"
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-}"
[ -n "$SRUN_CPUS_PER_TASK" ] || unset SRUN_CPUS_PER_TASK
if [ -z "${MASTER_ADDR:-}" ] && ! MASTER_ADDR=$(master_address); then
    say "no address of $SLURMD_NODENAME but its own loopback: other nodes could not reach it;" \
        "set slurm.environment.MASTER_ADDR"
    exit 1
fi
export MASTER_ADDR
STARTS="$RUN_FOLDER/slurm/$JOB.starts"
newest_step >>"$STARTS"
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || set -- "$@" "--fault_tolerance.replica_id=$SLURM_ARRAY_TASK_ID"
say "start $(wc -l <"$STARTS") after step $(tail -n 1 "$STARTS") on $SLURM_JOB_NODELIST," \
    "rendezvous at $MASTER_ADDR:$MASTER_PORT"

trap : TERM USR1 USR2 # this shell outlives the run
# USR1 must not end the shells and launchers that are only just starting; those who answer it say so themselves.
# shellcheck disable=SC2016,SC2086 # the words are for the shell on the node; $CONTAINER is several words
srun --kill-on-bad-exit=1 --cpu-bind=none bash -c '
    trap "" USR1 USR2
    NODE_RANK=$SLURM_NODEID LOG_FOLDER=$LOGS/node$SLURM_NODEID exec "$@"' node \
    ${CONTAINER:-} "$REPO/run_train.sh" "$@"
code=$?

case $code in
0) say "complete" && exit 0 ;;
2) say "not requeued: the configuration is wrong" && exit 2 ;;
esac
may_go_on || exit $code
if [ "$(tail -n "$MAX_STARTS_WITHOUT_PROGRESS" "$STARTS" | grep -cx "$(newest_step)")" = "$MAX_STARTS_WITHOUT_PROGRESS" ]; then
    say "not requeued: $MAX_STARTS_WITHOUT_PROGRESS starts in a row have not got past step $(newest_step)"
    exit $code
fi
trap '' TERM # with which Slurm ends this shell
say "exit code $code after step $(newest_step); requeued"
scontrol requeue "$JOB"
