#!/usr/bin/env bash
exec "$(dirname "${BASH_SOURCE[0]}")/train.sh" single_copy "$@"
