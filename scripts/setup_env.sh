# Sourced by the scripts that need Python. `setup_env EXTRAS` ("" or "dev,data") sets $PYTHON to the first of: $PYTHON;
# the active environment (python3 on PATH) if it has what pyproject.toml asks for; ./.venv; a new ./.venv. An installed
# torch is never replaced. With NO_SETUP=1 nothing is checked and nothing installed.

REPO="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)"
VENV="$REPO/.venv"
UNFINISHED="$VENV/unfinished" # there from before the installation until after it
PIP_LOG="$VENV/install.log"
export PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}" # this checkout, wherever the environment's own package points

say() { printf 'setup: %s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 2
}

setup_env() {
    local extras="$1"
    if [ -n "${NO_SETUP:-}" ]; then
        PYTHON="${PYTHON:-python3}"
    elif [ -n "${PYTHON:-}" ]; then
        local lacking
        lacking="$(check "$PYTHON" "$extras")" || fail "PYTHON=$PYTHON cannot be used: $lacking"
    elif check python3 "$extras" >/dev/null; then
        PYTHON=python3
    else
        PYTHON="$VENV/bin/python"
        [ ! -e "$UNFINISHED" ] && check "$PYTHON" "$extras" >/dev/null || install_alone "$extras"
    fi
    case "$PYTHON" in
    /*) ;;
    */*) PYTHON="$PWD/$PYTHON" ;; # the scripts change folders
    esac
}

check() { # PYTHON EXTRAS: succeeds, or prints what is lacking
    # shellcheck disable=SC2086
    "$1" "$REPO/scripts/check_environment.py" "$REPO/pyproject.toml" ${2//,/ } 2>&1
}

install_alone() { # EXTRAS: one process at a time; the others wait and find the work done
    exec 9<"$REPO"
    if command -v flock >/dev/null && ! flock --nonblock 9; then
        say "waiting for another process that is installing"
        flock 9
    fi
    if [ -e "$UNFINISHED" ]; then
        say "an installation was interrupted; starting over"
        rm -rf "$VENV"
    fi
    [ -d "$VENV" ] || make_venv
    check "$PYTHON" "$1" >/dev/null || install "$1"
    rm -f "$UNFINISHED"
    exec 9<&-
}

make_venv() {
    local base
    base="$(base_python)" || fail "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"
    say "no environment with torch found; making $VENV with $("$base" --version)"
    mkdir "$VENV"
    touch "$UNFINISHED"
    # Debian's Python has no ensurepip unless python3-venv is installed; any pip can install another.
    "$base" -m venv "$VENV" >"$PIP_LOG" 2>&1 ||
        { "$base" -m venv --without-pip "$VENV" &&
            "$base" -m pip --python "$PYTHON" install --quiet pip; } >>"$PIP_LOG" 2>&1 ||
        fail "cannot make $VENV: $(tail -n 3 "$PIP_LOG")"
}

base_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

install() { # EXTRAS
    local extras="${1:+[$1]}" start=$SECONDS constraints="$VENV/constraints.txt" torch
    say "installing torchtitan_clone$extras (some minutes; log: $PIP_LOG)"
    cp "$REPO/scripts/constraints.txt" "$constraints"
    torch="$("$PYTHON" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null)" &&
        sed -i "s/^torch==.*/torch==$torch/" "$constraints"
    "$PYTHON" -m pip install --disable-pip-version-check -c "$constraints" -e "$REPO$extras" 2>&1 | show_progress ||
        fail "installation failed; the end of $PIP_LOG: $(tail -n 5 "$PIP_LOG")"
    say "installed in $((SECONDS - start)) s"
}

show_progress() { # pip's output: all of it to the log, the package at hand to a terminal
    local line
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$PIP_LOG"
        case "$line" in
        Collecting* | *Downloading* | Installing*) [ ! -t 2 ] || printf '\r\033[K%.75s' "$line" >&2 ;;
        esac
    done
    [ ! -t 2 ] || printf '\r\033[K' >&2
}
