"""`python -m environments.api`: serve the rollout API."""

import argparse
import logging
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from environments.api.errors import SettingsError
from environments.api.settings import Settings
from grpo_common.text import PrintableFormatter

KEY_VARIABLE = "ROLLOUT_API_KEY"
_HELP = {
    "host": "address to listen on; any other than loopback needs --api-key",
    "port": "port to listen on; 0: a free one (default: %(default)s)",
    "store": "SQLite file that outlives the process (default: memory only)",
    "run_dir": "folder of the run, whose name and report the status page shows",
    "fsync": "also survive a power cut: flush the disk at every commit",
    "env_timeout": "seconds without a request after which no places in a batch are reserved for an environment any "
    "more (default: %(default)g)",
    "api_key": f"required of every client as `Authorization: Bearer KEY` (default: the variable {KEY_VARIABLE}, which "
    "a process list does not show)",
    "max_body_mb": "largest body of a request in MessagePack, in MiB, before and after decompression; in JSON a "
    "quarter of this (default: %(default)s)",
    "max_queued_mb": "refuse posts (429) while this many MiB of groups are queued (default: %(default)s)",
    "cors_origins": "web origin whose pages may call the API",
}

NO_TLS = "grpo api does not serve TLS; put a proxy that does before it (SECURITY.md)"
NO_MEMORY_MB = "--memory-mb has been removed and changes nothing; leave it out: --max-queued-mb bounds what waits"


def parse(arguments: list[str] | None = None) -> Settings:
    """Return the settings of a command line; end the process with code 2 where they cannot go together."""
    parser = argparse.ArgumentParser(prog="grpo api", description="Serve the rollout API.")
    for each in fields(Settings):
        how: dict[str, Any] = {"type": type(each.default), "default": each.default, "help": _HELP[each.name]}
        match each.name:
            case "store" | "run_dir":
                how["type"] = Path
            case "api_key":
                how |= {"type": str, "default": os.environ.get(KEY_VARIABLE) or None}
            case "fsync":
                how = {"action": "store_true", "help": _HELP[each.name]}
            case "cors_origins":
                how = {"action": "append", "default": [], "dest": each.name, "help": _HELP[each.name]}
        parser.add_argument(f"--{each.name.replace('_', '-').removesuffix('s')}", **how)
    # Removed options. Without TLS texts would travel in the clear, so that is an error. A stored run may have the other
    # one among its arguments for this command, and continues.
    removed: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument("--ssl-certfile", "--ssl-keyfile", type=_no_tls, **removed)
    parser.add_argument("--memory-mb", **removed)
    given = vars(parser.parse_args(arguments))
    if given.pop("memory_mb", None) is not None:
        print(f"warning: {NO_MEMORY_MB}", file=sys.stderr)
    try:
        return Settings(**given)
    except SettingsError as error:
        parser.error(str(error))


def _no_tls(_: str) -> None:
    raise argparse.ArgumentTypeError(NO_TLS)


def main(arguments: list[str] | None = None) -> int:
    """Serve; see `environments.api.server.serve` for the exit code."""
    settings = parse(arguments)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    from environments.api.server import serve  # after the arguments: --help needs no web framework

    return serve(settings)


if __name__ == "__main__":
    sys.exit(main())
