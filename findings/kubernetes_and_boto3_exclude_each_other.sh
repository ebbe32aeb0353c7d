#!/usr/bin/env bash
# kubernetes: the Python client of Kubernetes 37 and boto3 cannot be in one environment.
#
# Expected: who starts runs on Kubernetes and keeps checkpoints on S3 installs the clients of both, as with kubernetes 36.
# Seen with kubernetes 37.0.2 and boto3 1.44.8: pip finds no solution. kubernetes 37 requires python-dateutil 3 or later,
# and botocore, of which boto3 (and with it moto, s3fs and most launchers of jobs) is made, requires an earlier one. The
# second install into an environment that has one of them succeeds with a warning and breaks what the first one asked for.
# Pin kubernetes below 37 where botocore is, or speak to S3 by a library without it, such as obstore.
# Exit status 0 while that is so, 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" --disable-pip-version-check)
resolves() { "${pip[@]}" install --dry-run "$@" >"$folder/log" 2>&1; }

resolves kubernetes==36.0.3 boto3==1.44.8
echo "kubernetes 36.0.3 with boto3 1.44.8: resolved"
if resolves kubernetes==37.0.2 boto3==1.44.8; then
    echo "kubernetes 37.0.2 with boto3 1.44.8: resolved, which it was not"
    exit 1
fi
grep -E "kubernetes .*depends on python-dateutil|botocore .*depends on python-dateutil" "$folder/log" | sort -u
"${pip[@]}" install --quiet kubernetes==37.0.2 2>"$folder/log"
"${pip[@]}" install --quiet boto3==1.44.8 2>>"$folder/log" # succeeds, and changes python-dateutil
"$folder/venv/bin/pip" list --format=freeze 2>/dev/null | grep -E "^(kubernetes|boto3|botocore|python-dateutil)="
! "${pip[@]}" check
