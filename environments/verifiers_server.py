"""Environments of the `verifiers` library: ``grpo env verifiers --env-id ID …``.

``grpo env verifiers install [PACKAGE …]`` makes the virtual environment in which they run, once; all other commands are
those of every environment and go on in there.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from environments.config import ConfigError
from environments.verifiers_venv import VERSION, become, install

MODULE = "environments.verifiers_server"


def normalised(arguments: list[str]) -> list[str]:
    """The command line as every environment has it: `serve` if no command is named, `--env-id` for `--env.env_id`."""
    if arguments and arguments[0].startswith("--") and arguments[0] != "--help":
        arguments = ["serve", *arguments]
    return [
        argument.replace("--env-id", "--env.env_id", 1) if argument.partition("=")[0] == "--env-id" else argument
        for argument in arguments
    ]


def main(arguments: list[str]) -> None:
    """Installs, or runs the environment, in the right virtual environment."""
    try:
        if arguments[:1] == ["install"]:
            print(f"verifiers {VERSION} is installed in {install(arguments[1:])}")
            return
        if find_spec("verifiers") is None:
            become(MODULE, arguments)
    except ConfigError as error:
        print(f"grpo env verifiers: {error}", file=sys.stderr)
        sys.exit(2)
    from environments.verifiers_env import VerifiersEnv

    VerifiersEnv.cli(normalised(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
