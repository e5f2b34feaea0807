"""The former name of `environments.gsm8k`."""

import sys
from pathlib import Path

if not __package__:  # run by its path: sys.path needs the repository's root instead of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from environments.gsm8k import Gsm8kEnv

if __name__ == "__main__":
    Gsm8kEnv.cli()
