#!/usr/bin/env bash
# Writes locks/: the exact versions that quickstart.sh and test.sh install, worked out from pyproject.toml by uv.
#
#   scripts/lock.sh              add what pyproject.toml has new, and keep every version that it still allows
#   scripts/lock.sh --upgrade    take the newest versions that it allows
#
# One file for each build of vLLM (cpu, gpu) and each Python (3.11, 3.12), for Linux on x86-64.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case ${1:-} in
    '' | --upgrade) ;;
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
    *) fail "$1: unknown option; wanted --upgrade" ;;
esac

get_uv "${GRPO_VENV:-$repository/.venv}"
[ -n "$UV" ] || fail "needs uv: pip install uv"
cd "$repository"
mkdir -p locks
extras=(--extra envs --extra qlora --extra ray --extra trackers --extra wandb --extra dev)
# vLLM's CPU build needs torch's, VERSION+cpu, which lies beside the default registry: GRPO_TORCH_INDEX
torch=$(sed -n 's/^cpu = \["\(torch==[^"]*\)".*/\1/p' pyproject.toml)
[ -n "$torch" ] || fail "pyproject.toml: the extra cpu has no torch==VERSION"
overrides=$(mktemp)
trap 'rm "$overrides"' EXIT
echo "$torch" >"$overrides"

for python in 3.11 3.12; do
    for build in cpu gpu; do
        file=locks/$build-py${python/./}.txt
        echo "$file"
        options=(--extra "$build" --python-version "$python" --python-platform x86_64-manylinux_2_28)
        [ "$build" = gpu ] || options+=(--excludes locks/cpu-excludes.txt --overrides "$overrides")
        (
            [ "$build" = cpu ] || unset UV_FIND_LINKS UV_INDEX UV_INDEX_STRATEGY # places of torch's CPU build are not for this one
            "$UV" pip compile pyproject.toml "${options[@]}" "${extras[@]}" "$@" --output-file "$file" \
                --quiet --no-header --no-annotate
        )
        # torch's CPU build needs no CUDA packages. For a Python that it was not found for, its version is the same
        [ "$build" = gpu ] || sed -i -e '/^nvidia-ml-py/!{/^nvidia-/d}; /^cuda-/d' -e "s/^$torch$/&+cpu/" "$file"
    done
done
