#!/bin/sh
# The project's virtual environments, for the Makefile and .ci/run. POSIX sh, and until a Python is found nothing but its builtins.
#
#   venv.sh choose               print the Python to use ("uv" where only uv can bring one), or the line that installs one and exit 1
#   venv.sh install DIR EXTRA..  make DIR a virtual environment that holds the project with these extras of pyproject.toml
#
# install writes a stamp for an extra only after pip succeeded, keyed by pyproject.toml, constraints.txt and this folder: after a
# failure the same command goes on (pip keeps what it had downloaded), and a changed file installs again. Exit 1 on a refusal.
set -u

# Exits 0 and prints the interpreter's own path only if it runs, is in range and can make a virtual environment with pip in it.
probe='import sys, venv, ensurepip
print(sys.executable) if (3, 11) <= sys.version_info[:2] <= (3, 13) else sys.exit(1)'

has() { command -v "$1" >/dev/null 2>&1; }
say() { printf '%s\n' "$*" >&2; }

install_line() {
    if has apt-get; then
        for version in 3.13 3.12 3.11; do # the releases differ in which of these they carry
            if has apt-cache && apt-cache show "python$version-venv" >/dev/null 2>&1; then
                echo "sudo apt-get install -y python$version-venv"
                return
            fi
        done
        echo "sudo apt-get update && sudo apt-get install -y python3-venv"
    elif has dnf; then
        echo "sudo dnf install -y python3.13"
    elif has pacman; then
        echo "sudo pacman -S --needed uv" # Arch's own Python is newer than 3.13; uv brings one
    elif has apk; then
        echo "sudo apk add python3"
    elif has brew; then
        echo "brew install python@3.13"
    else
        echo "install uv or Python 3.13 from python.org, and put it on PATH"
    fi
}

choose() {
    if [ -n "${PYTHON:-}" ]; then
        "$PYTHON" -c "$probe" 2>/dev/null && return
        say "PYTHON=$PYTHON doesn't run as Python 3.11, 3.12 or 3.13 with venv and ensurepip. Name another one, or unset PYTHON."
        return 1
    fi
    for name in python3.13 python3.12 python3.11; do # tried by running: a pyenv shim is on PATH and still may not run
        "$name" -c "$probe" 2>/dev/null && return
    done
    if has uv; then
        echo uv
        return
    fi
    say "kvferry needs Python 3.11, 3.12 or 3.13 with venv; none runs here. Install one, then run the same command again:"
    say "  $(install_line)"
    return 1
}

# MB downloaded, MB on disk: measured in clean environments (Python 3.11, Linux x86-64) with constraints.txt. "base" is the virtual
# environment, the dependencies and the extras runtime and build; each other row is what it adds.
size() {
    case $1 in
        base) echo 47 313 ;;
        sync) echo 15 55 ;;
        test) echo 64 213 ;; # of it 46 and 147 a real S3 server, on Linux
        check) echo 27 91 ;;
        demo) echo 242 296 ;; # nearly all of it is the model package
        reference) echo 55 266 ;;
        *) echo 0 0 ;;
    esac
}

# A virtual environment that runs, of a Python in range (and PYTHON's own version, where that is set), with pip.
usable() {
    "$1/bin/python" -c 'import pip' 2>/dev/null || return 1
    version='import sys; print(*sys.version_info[:2])'
    found=$("$1/bin/python" -c "$version")
    case $found in '3 11' | '3 12' | '3 13') ;; *) return 1 ;; esac
    [ -z "${PYTHON:-}" ] || [ "$found" = "$("$PYTHON" -c "$version" 2>/dev/null)" ]
}

create() {
    python=$(choose) || return 1
    if [ "$python" = uv ]; then
        UV_VENV_CLEAR=1 uv venv --quiet --seed --python '>=3.11,<3.14' "$1"
    else
        "$python" -m venv --clear "$1"
    fi || { say "Could not make the virtual environment $1; what to do is above. Then run the same command again."; return 1; }
}

pip_install() {
    if [ -t 1 ]; then
        "$venv/bin/python" -m pip install --disable-pip-version-check "$@"
    else # no progress bars in a log: quiet, and the end of pip's own log on failure
        "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-input "$@" >"$venv/pip.log" 2>&1 ||
            { status=$?; tail -n 15 "$venv/pip.log" >&2; return $status; }
    fi
}

install() {
    venv=$1
    shift
    key="$(cat pyproject.toml constraints.txt | cksum) $PWD"
    usable "$venv" || rm -f "$venv"/installed-*
    base=base missing='' download=0 disk=0
    for stamp in "$venv"/installed-*; do [ -e "$stamp" ] && base=''; done
    for extra in "$@"; do
        [ "$(cat "$venv/installed-$extra" 2>/dev/null)" = "$key" ] || missing="$missing $extra"
    done
    [ -n "$missing" ] || return 0
    for extra in $base $missing; do
        set -- $(size "$extra")
        download=$((download + $1)) disk=$((disk + $2))
    done
    say "Installing$missing into $venv: about $download MB to download (less what pip has cached), $disk MB on disk."
    usable "$venv" || create "$venv" || return 1
    pip_install -c constraints.txt -e ".[$(echo $missing | tr ' ' ,)]" ||
        { say "pip did not finish. Run the same command again: it goes on with what is already downloaded."; return 1; }
    for extra in $missing; do echo "$key" >"$venv/installed-$extra"; done
}

cd "$(dirname "$0")/.." || exit 1
case ${1:-} in
    choose) choose ;;
    install) [ $# -ge 3 ] || { say "usage: venv.sh install DIR EXTRA.."; exit 2; }
        shift
        install "$@" ;;
    *) say "usage: venv.sh choose | venv.sh install DIR EXTRA.."; exit 2 ;;
esac
