"""`python -m environments.api`: serve the rollout API."""

import argparse
import logging
import os
import sys
from pathlib import Path

from environments.api.settings import Settings, SettingsError
from grpo_common.text import PrintableFormatter

KEY_VARIABLE = "ROLLOUT_API_KEY"


def parse(arguments: list[str] | None = None) -> Settings:
    """Settings from the command line; ends the process with code 2 where they cannot go together."""
    default = Settings()
    parser = argparse.ArgumentParser(prog="grpo api", description="Serve the rollout API.")
    add = parser.add_argument
    add("--host", default=default.host, help="address to listen on; any other than loopback needs --api-key")
    add("--port", type=int, default=default.port, help=f"port to listen on; 0: a free one (default: {default.port})")
    add("--store", type=Path, help="SQLite file that outlives the process (default: memory only)")
    add("--run-dir", type=Path, help="folder of the run, whose name and report the status page shows")
    add("--fsync", action="store_true", help="also survive a power cut: flush the disk at every commit")
    add(
        "--env-timeout",
        type=float,
        default=default.env_timeout,
        help="seconds without a request after which no places in a batch are reserved for an environment any more "
        f"(default: {default.env_timeout:g})",
    )
    add(
        "--api-key",
        default=os.environ.get(KEY_VARIABLE) or None,
        help=f"required of every client as `Authorization: Bearer KEY` (default: the variable {KEY_VARIABLE}, which "
        "a process list does not show)",
    )
    add(
        "--max-body-mb",
        type=int,
        default=default.max_body_mb,
        help="largest body of a request in MessagePack, in MiB, before and after decompression; in JSON a quarter of "
        f"this (default: {default.max_body_mb})",
    )
    add(
        "--memory-mb",
        type=int,
        default=default.memory_mb,
        help="MiB of queued groups kept in memory; further groups go to the store, or without one to a temporary file "
        f"(default: {default.memory_mb})",
    )
    add(
        "--max-queued-mb",
        type=int,
        default=default.max_queued_mb,
        help="refuse posts (429) while this many MiB of groups are queued, in memory and on disk together "
        f"(default: {default.max_queued_mb})",
    )
    add(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        default=[],
        help="web origin whose pages may call the API",
    )
    # Removed options: kept only for the error that says what to do instead.
    add("--ssl-certfile", "--ssl-keyfile", type=_no_tls, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    try:
        return Settings(**vars(parser.parse_args(arguments)))
    except SettingsError as error:
        parser.error(str(error))


def _no_tls(_: str) -> None:
    raise argparse.ArgumentTypeError("grpo api does not serve TLS; put a proxy that does before it (SECURITY.md)")


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
