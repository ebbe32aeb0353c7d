# Sourced by scripts that run Python. `setup_env EXTRAS` ("" or "dev,data") sets $PYTHON to the first usable of: $PYTHON;
# the active environment (python3 on PATH) if it satisfies pyproject.toml; ./.venv; a new ./.venv. Never replaces an
# installed torch. With NO_SETUP=1 nothing is checked or installed.

REPO="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)"
VENV="$REPO/.venv"
UNFINISHED="$VENV/unfinished" # exists while an installation is in progress
PIP_LOG="$VENV/install.log"
export PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}" # import this checkout, not an installed copy

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
        local problems
        problems="$(check "$PYTHON" "$extras")" || fail "PYTHON=$PYTHON cannot be used: $problems"
    elif check python3 "$extras" >/dev/null; then
        PYTHON=python3
    else
        PYTHON="$VENV/bin/python"
        [ ! -e "$UNFINISHED" ] && check "$PYTHON" "$extras" >/dev/null || install_exclusively "$extras"
    fi
    case "$PYTHON" in
    /*) ;;
    */*) PYTHON="$PWD/$PYTHON" ;; # scripts change the working directory
    esac
}

check() { # PYTHON EXTRAS: succeeds, or prints what is missing
    # shellcheck disable=SC2086
    "$1" "$REPO/scripts/check_environment.py" "$REPO/pyproject.toml" ${2//,/ } 2>&1
}

install_exclusively() { # EXTRAS: one process installs; others wait for it
    exec 9>>"$VENV.lock" # NFS does not tell other machines of locks on folders
    if command -v flock >/dev/null && ! flock --nonblock 9; then
        say "waiting for another process that installs packages"
        flock 9
    fi
    if [ -e "$UNFINISHED" ]; then
        say "removing an incomplete installation"
        rm -rf "$VENV"
    fi
    [ -d "$VENV" ] || make_venv
    check "$PYTHON" "$1" >/dev/null || install "$1"
    rm -f "$UNFINISHED"
    exec 9>&-
}

make_venv() {
    local base
    base="$(base_python)" || fail "no Python 3.11 or newer found; install one, or set PYTHON=/path/to/python3.11"
    say "no environment with torch found; creating $VENV with $("$base" --version)"
    mkdir "$VENV"
    touch "$UNFINISHED"
    # Debian's Python lacks ensurepip without python3-venv; another pip can install pip into the environment.
    "$base" -m venv "$VENV" >"$PIP_LOG" 2>&1 ||
        { "$base" -m venv --without-pip "$VENV" &&
            "$base" -m pip --python "$PYTHON" install --quiet pip; } >>"$PIP_LOG" 2>&1 ||
        fail "cannot create $VENV: $(tail -n 3 "$PIP_LOG")"
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
    say "installing torchtitan_clone$extras (takes minutes; log: $PIP_LOG)"
    cp "$REPO/scripts/constraints.txt" "$constraints"
    if torch="$("$PYTHON" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null)"; then
        # Triton's version is that of the torch below.
        grep -qx "torch==${torch%%+*}" "$constraints" || sed -i "/^triton==/d" "$constraints"
        sed -i "s/^torch==.*/torch==$torch/" "$constraints"
    fi
    "$PYTHON" -m pip install --disable-pip-version-check -c "$constraints" -e "$REPO$extras" 2>&1 | show_progress ||
        fail "installation failed; last lines of $PIP_LOG: $(tail -n 5 "$PIP_LOG")"
    say "installed in $((SECONDS - start)) s"
}

show_progress() { # writes pip's output to the log, and the current package to a terminal
    local line
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$PIP_LOG"
        case "$line" in
        Collecting* | *Downloading* | Installing*) [ ! -t 2 ] || printf '\r\033[K%.75s' "$line" >&2 ;;
        esac
    done
    [ ! -t 2 ] || printf '\r\033[K' >&2
}
