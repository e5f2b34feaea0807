#!/usr/bin/env bash
# bash scripts/setup.sh: installs, and trains nothing. The other scripts source this file and call `prepare`, which makes
# the virtual environment once and sets $PYTHON to its interpreter.
#
#   GRPO_VENV         where the environment lies (default: .venv in the repository)
#   GRPO_PYTHON       use this interpreter as it is and install nothing: for machines without a package registry
#   GRPO_TORCH_INDEX  an extra package index for torch's CPU build
#   GRPO_LATEST=1     install the newest versions that pyproject.toml allows, not those of locks/
#
# uv installs (5 times faster than pip); where it cannot be had, pip installs the same versions.

unset CDPATH # with it `cd` prints, and may go elsewhere
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Python keeps what it has compiled, whatever the shell asks for: without that an import of vLLM takes 3 times as long.
unset PYTHONDONTWRITEBYTECODE

fail() { echo "$(basename "$0"): $*" >&2; exit 1; }

# The newest Python that both vLLM builds support.
find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or 3.12 (found none on the PATH)"
}

check_memory() { # in GB, wanted
    local available
    available=$(awk '/MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
    [ "$available" -ge "$1" ] || fail "needs $1 GB of free memory, $available GB are free: close other programs"
}

make_venv() { # FOLDER
    local python
    [ ! -x "$1/bin/python" ] || return 0
    python=$(find_python) || exit 1
    "$python" -m venv "$1" || fail "could not make a virtual environment in $1"
}

# get_uv VENV: sets $UV, empty where there is none, and gives it pip's own registry and folders of packages.
get_uv() {
    local venv=$1 folders registry
    UV=$(command -v "$venv/bin/uv" || command -v uv || true)
    [ -z "$UV" ] || "$UV" pip install --help 2>/dev/null | grep -q -e --excludes || UV= # too old
    if [ -z "$UV" ]; then
        make_venv "$venv"
        ! pip_install "$venv/bin/python" --upgrade uv || UV=$venv/bin/uv
    fi
    folders=$(pip_setting find-links)
    registry=$(pip_setting index-url)
    [ -z "$folders" ] || export UV_FIND_LINKS=${UV_FIND_LINKS:-${folders// /,}}
    [ -z "$registry" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$registry}
    if [ -n "${GRPO_TORCH_INDEX:-}" ]; then
        export UV_INDEX=$GRPO_TORCH_INDEX UV_INDEX_STRATEGY=unsafe-best-match # as pip has it: the best of all indexes
    fi
}

# pip_setting KEY: what pip was configured with, by its environment or its files.
pip_setting() {
    local variable=${1^^}
    variable=PIP_${variable//-/_}
    echo "${!variable:-$("${PYTHON:-python3}" -m pip config get "global.$1" 2>/dev/null || true)}" | tr -s '\n' ' ' | sed 's/ $//'
}

pip_install() { # PYTHON ARGUMENTS…; what pip says of package locations is of no use to a reader
    "$1" -m pip install --quiet --disable-pip-version-check "${@:2}" 2> >(grep -v '^WARNING: Location' >&2)
}

install() { # BUILD EXTRAS
    local build=$1 extras=$2 lock options=()
    lock=$repository/locks/$build-py$("$PYTHON" -c 'import sys; print("%d%d" % sys.version_info[:2])').txt
    if [ -n "$UV" ]; then
        if [ -n "${GRPO_LATEST:-}" ]; then options+=(--upgrade); else options+=(--constraints "$lock"); fi
        # places of torch's CPU build are not for the other one
        if [ "$build" = gpu ]; then unset UV_FIND_LINKS UV_INDEX UV_INDEX_STRATEGY; else
            options+=(--excludes "$repository/locks/cpu-excludes.txt")
        fi
        "$UV" pip install --quiet --python "$PYTHON" "${options[@]}" --editable "${repository}[$build,$extras]"
    else
        [ -z "${GRPO_LATEST:-}" ] || fail "GRPO_LATEST needs uv: pip install uv"
        pip_install "$PYTHON" ${GRPO_TORCH_INDEX:+--extra-index-url "$GRPO_TORCH_INDEX"} \
            --no-deps --requirement "$lock" --editable "$repository"
    fi
}

# print_path: how `grpo` becomes a command of the shell that called the script.
print_path() {
    echo "to have \`grpo\` as a command: export PATH=$(cd "$(dirname "$PYTHON")" && pwd):\$PATH"
}

# prepare EXTRAS: an environment with the project and its extras, made or brought up to date only when they changed.
prepare() {
    local extras=$1 venv=${GRPO_VENV:-$repository/.venv} build stamp installed extra have=, missing=
    if [ -n "${GRPO_PYTHON:-}" ]; then
        PYTHON=$(command -v "$GRPO_PYTHON") || fail "GRPO_PYTHON=$GRPO_PYTHON: no such interpreter"
        export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
        "$PYTHON" -c 'import torch, vllm, peft, typer' || fail "GRPO_PYTHON=$GRPO_PYTHON lacks packages (see above)"
        return
    fi
    if nvidia-smi --list-gpus >/dev/null 2>&1; then build=gpu; else build=cpu; fi
    PYTHON=$venv/bin/python
    # The stamp says what is installed: "<build> <hash of pyproject.toml and locks> ,envs,dev,"
    stamp="$build${GRPO_LATEST:+-latest} $(cat "$repository/pyproject.toml" "$repository"/locks/* | sha256sum | cut -d' ' -f1)"
    installed=$(cat "$venv/.grpo-installed" 2>/dev/null || true)
    if [ -x "$PYTHON" ] && [ "${installed% *}" = "$stamp" ]; then
        have=${installed##* }
        for extra in ${extras//,/ }; do [[ $have == *",$extra,"* ]] || missing=1; done
        [ -n "$missing" ] || return 0
    fi
    for extra in ${extras//,/ }; do [[ $have == *",$extra,"* ]] || have=$have$extra,; done
    echo "installing into $venv ($build build of vLLM; a minute or two)"
    make_venv "$venv"
    get_uv "$venv"
    rm -f "$venv/.grpo-installed" # an installation that breaks off is none
    extras=${have#,}
    install "$build" "${extras%,}" ||
        fail "could not install: is a package registry reachable (pip config list)? An interpreter that has everything" \
            "can be used with GRPO_PYTHON=/path/to/python3"
    echo "$stamp $have" >"$venv/.grpo-installed"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then # executed, not sourced
    set -euo pipefail
    prepare envs,wandb
    print_path
fi
