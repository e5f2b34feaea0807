"""`python -m vllm_server --model PATH [--port 9001] [any flag of vllm serve]`."""

import errno
import socket
import sys
from pathlib import Path

import psutil

from vllm_server import arguments
from vllm_server.errors import StartError


def main(argv: list[str]) -> int:
    """Serve until a signal comes. The exit status: 0 after a signal, 2 a wrong command, 1 anything else."""
    try:
        # What can be told at once is told before vLLM is imported (seconds) and the model loaded (more).
        early = arguments.early_arguments(argv)
        if early.uds is None:
            check_port_free(early.host, early.port)
        if early.model is not None:
            check_model_path(early.model)
        arguments.set_environment()
        return _serve(argv)
    except StartError as error:
        print(f"vllm_server: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("vllm_server: stopped before it was ready", file=sys.stderr, flush=True)
        return 130


def _serve(argv: list[str]) -> int:
    from vllm_server import app, compat, preflight

    args = arguments.parse(argv)
    compat.assert_seams()
    report = preflight.inspect_model(args.model, trust_remote_code=args.trust_remote_code)
    if not report.supported:
        raise StartError(f"--model {args.model}: {report.reason}")
    app.serve(args)
    return 0


def check_port_free(host: str, port: int) -> None:
    """Raise a StartError that names the holder if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                holder = _holder(port)
                raise StartError(
                    f"--port {port}: got a port that {holder} holds, wanted a free one; "
                    "end that process or choose another port"
                ) from error
            raise StartError(f"--host {host}, --port {port}: cannot listen there ({error.strerror})") from error


def _holder(port: int) -> str:
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                break  # another user's
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                command = "?"
            return f"process {connection.pid} ({command[:120]})"
    return "another user's process"


def check_model_path(model: str) -> None:
    """Raise a StartError if `model` looks like a path and no model is there."""
    path = Path(model).expanduser()
    looks_like_path = path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / "params.json").is_file():
            raise StartError(f"--model {model}: got a folder without config.json, wanted a saved model")
    elif looks_like_path or path.exists():
        raise StartError(f"--model {model}: got no such folder, wanted a saved model's folder or a hub name")


if __name__ == "__main__":  # the engine is spawned, and a spawned process may import this module again
    sys.exit(main(sys.argv[1:]))
