"""Environments of the `verifiers` library: ``grpo env verifiers --env-id ID …``.

``grpo env verifiers install [PACKAGE …]`` creates their virtual environment, once. All other commands are those of
every environment and run in it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from environments.config import ConfigError
from environments.from_verifiers.venv import VERSION, become, folder, install
from environments.running.cli import COMMANDS

MODULE = "environments.verifiers_server"
HELP = {"-h", "--help"}


def usage() -> str:
    """Return the text of `--help`; this needs no installation."""
    commands = {"install": f"install verifiers {VERSION} and PACKAGEs into {folder()}", **COMMANDS}
    lines = "\n".join(f"  {name:<10}{text}" for name, text in commands.items())
    return f"""usage: grpo env verifiers install [PACKAGE …]
       grpo env verifiers [serve] --env-id ID [--env.… …] [--openai.… …] [--config FILE.toml]
       grpo env verifiers process|evaluate --env-id ID [--env.… …] [--openai.… …] [--config FILE.toml]

Environments of the `verifiers` library, in a separate virtual environment.

{lines}

--env-id, short for --env.env_id: a taskset, given as a module that Python finds or a package installed as above;
ENV+TASKSET combines an environment with a taskset.

Options of a command, after verifiers is installed: grpo env verifiers serve --help"""


def normalised(arguments: list[str]) -> list[str]:
    """Return the command line in the form of every environment: with `serve` as default, and `--env.env_id`."""
    if arguments and arguments[0].startswith("--") and arguments[0] != "--help":
        arguments = ["serve", *arguments]
    return [
        argument.replace("--env-id", "--env.env_id", 1) if argument.partition("=")[0] == "--env-id" else argument
        for argument in arguments
    ]


def main(arguments: list[str]) -> None:
    """Print help, install, or run the environment in its virtual environment."""
    if not arguments or arguments[0] in HELP or (arguments[0] == "install" and HELP & {*arguments}):
        print(usage())
        sys.exit(0 if arguments else 2)
    try:
        if arguments[:1] == ["install"]:
            print(f"verifiers {VERSION} is installed in {install(arguments[1:])}")
            return
        if find_spec("verifiers") is None:
            become(MODULE, arguments)
    except ConfigError as error:
        print(f"grpo env verifiers: {error}", file=sys.stderr)
        sys.exit(2)
    from environments.from_verifiers.env import VerifiersEnv

    VerifiersEnv.cli(normalised(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
