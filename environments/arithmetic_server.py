"""The former name of `environments.arithmetic`."""

import sys
from pathlib import Path

if not __package__:  # run by its path: sys.path needs the repository's root instead of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from environments.arithmetic import ArithmeticEnv

if __name__ == "__main__":
    ArithmeticEnv.cli()
