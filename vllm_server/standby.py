"""`python -m vllm_server.standby`: a server that imports vLLM now and gets its arguments later.

It reads one line from standard input: the arguments of `python -m vllm_server` as a JSON list of strings. With them it
becomes that server. If the input ends without a line, the process exits. Until the line arrives it holds no port and no
GPU memory.
"""

import sys

import msgspec

from vllm_server import arguments, forking
from vllm_server.__main__ import main as serve
from vllm_server.errors import FatalError
from vllm_server.start_checks import check_vllm


def main() -> int:
    """Return the server's exit status; 0 if there was nothing to serve."""
    try:
        check_vllm()
        arguments.set_environment()
        forking.start()
        import_all()
        if forking.cuda_is_initialised():
            print(
                "vllm_server: this standby process holds GPU memory while it waits for its arguments, since its "
                "imports have initialised CUDA; use --no-vllm-standby to start none",
                file=sys.stderr,
                flush=True,
            )
        line = sys.stdin.readline()
        if not line:
            return 0
        argv = _arguments(line)
    except FatalError as error:
        print(f"vllm_server: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    sys.argv[1:] = argv  # vLLM reads them there
    return serve(argv)


def import_all() -> None:
    """Import what a server imports before and after it starts its engine."""
    from vllm_server import app, compat, model_check, sharing  # noqa: F401  # these import the rest

    compat.assert_seams()
    compat.server_parser(arguments.PROGRAM, "")


def _arguments(line: str) -> list[str]:
    try:
        return msgspec.json.decode(line, type=list[str])
    except msgspec.DecodeError as error:
        raise FatalError(
            field="standard input",
            got=f"{line.strip()[:200]!r} ({error})",
            wanted='arguments as a JSON list of strings, for example ["--model", "runs/demo-model"]',
        ) from error


if __name__ == "__main__":  # the engine's process may import this module again
    sys.exit(main())
