"""`python -m vllm_server --model PATH [--port 9001] [any flag of vllm serve]`."""

import sys
import traceback

from grpo_common.text import printable, printable_lines
from vllm_server import flags, forking, seams
from vllm_server.checks import (
    check_key,
    check_model,
    check_model_path,
    check_port_free,
    check_vllm,
    keys_of,
    prepare_writable,
)
from vllm_server.errors import FatalError, gist


def main(argv: list[str]) -> int:
    """Serve until a signal arrives.

    Return the exit status: 0 after a signal, 2 for a wrong command, 1 for any other failure.
    """
    if {"-h", "--help"}.intersection(argv):
        flags.own_parser().print_help()
        return 0
    try:
        if flags.HELP_ALL in argv:
            check_vllm()
            flags.set_environment()
            flags.parse(["--help"])  # prints and exits
        # Cheap checks run first: importing vLLM takes seconds, and loading the model takes longer.
        early = flags.early(argv)
        if early.uds is None:
            if early.config is None:  # a config file may set any of these; `_serve` checks again
                check_key(early.host, keys_of(early.api_key))
            check_port_free(early.host, early.port)
        if early.model is not None:
            check_model_path(early.model)
        check_vllm()
        flags.set_environment()
        forking.start()  # imports the engine's half while this process imports its own
        return _serve(argv)
    except FatalError as error:
        print(f"vllm_server: {printable_lines(str(error))}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception as error:
        # An unexpected error, or vLLM's refusal of a flag: the traceback helps to locate it, the last line names it.
        print(printable_lines(traceback.format_exc()), file=sys.stderr)
        print(f"vllm_server: {printable(gist(error))}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("vllm_server: stopped before it was ready", file=sys.stderr, flush=True)
        return 130


def _serve(argv: list[str]) -> int:
    args = flags.parse(argv)
    if args.uds is None:
        check_key(args.host, keys_of(args.api_key))
    seams.probe(writable=args.shared_weights or args.receive_weights)
    prepare_writable(args)
    check_model(args.model, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    from vllm_server.serve import serve  # imports vLLM

    serve(args)
    return 0


if __name__ == "__main__":  # the engine's process may import this module again
    sys.exit(main(sys.argv[1:]))
