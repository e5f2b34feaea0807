# shellcheck shell=bash
# Sourced by the other scripts: makes the virtual environment once and sets $PYTHON to its interpreter.
#
#   GRPO_VENV    where the environment lies (default: .venv in the repository)
#   GRPO_PYTHON  use this interpreter as it is and install nothing: for machines without a package registry
#   GRPO_TORCH_INDEX  an extra package index for torch's CPU build

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

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

install() { # what pip says of package locations is of no use to a reader
    "$PYTHON" -m pip install --quiet --disable-pip-version-check "$@" 2> >(grep -v '^WARNING: Location' >&2) ||
        fail "could not install $*: is a package registry reachable (pip config list)? An interpreter that has" \
            "everything can be used with GRPO_PYTHON=/path/to/python3"
}

# install_but PROJECT PACKAGE…: all that pip would, but these packages, which are not there at any moment: an environment
# in use stays whole.
install_but() {
    local project=$1 plan
    shift
    plan=$(mktemp -d)
    install --dry-run --report "$plan/report.json" --editable "$project"
    "$PYTHON" - "$plan/report.json" "$@" >"$plan/requirements.txt" <<'PYTHON'
import json, sys
report, *unwanted = sys.argv[1:]
for package in json.load(open(report))["install"]:
    about = package["metadata"]
    if about["name"] not in unwanted and "dir_info" not in package["download_info"]:  # the project itself has that
        print(f"{about['name']}=={about['version']}")
PYTHON
    "$PYTHON" -m pip uninstall --quiet --yes "$@" >/dev/null 2>&1 || true # of an installation by hand
    install --no-deps --requirement "$plan/requirements.txt" --editable "$project"
    rm -r "$plan"
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
    # The stamp says what is installed: "<build> <hash of pyproject.toml> ,envs,dev,"
    stamp="$build $(sha256sum <"$repository/pyproject.toml" | cut -d' ' -f1)"
    installed=$(cat "$venv/.grpo-installed" 2>/dev/null || true)
    if [ -x "$PYTHON" ] && [ "${installed% *}" = "$stamp" ]; then
        have=${installed##* }
        for extra in ${extras//,/ }; do [[ $have == *",$extra,"* ]] || missing=1; done
        [ -n "$missing" ] || return 0
    fi
    for extra in ${extras//,/ }; do [[ $have == *",$extra,"* ]] || have=$have$extra,; done
    echo "installing into $venv ($build build of vLLM; some minutes)"
    [ -x "$PYTHON" ] || "$(find_python)" -m venv "$venv" || fail "could not make a virtual environment in $venv"
    extras=${have#,}
    if [ "$build" = cpu ]; then # torch first: left to itself, pip may bring the CUDA build
        install torch==2.13.0 ${GRPO_TORCH_INDEX:+--extra-index-url "$GRPO_TORCH_INDEX"}
        # vLLM's CPU build asks for these, whose builds for another torch break importing transformers' models
        install_but "${repository}[cpu,${extras%,}]" torchvision torchaudio torchcodec
    else
        install --editable "${repository}[gpu,${extras%,}]"
    fi
    echo "$stamp $have" >"$venv/.grpo-installed"
}
