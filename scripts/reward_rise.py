#!/usr/bin/env python
"""Print how the mean reward of a run rose, as one JSON object: python scripts/reward_rise.py RUN_DIR [--min-rise 0.3]

Exit with 1 if it rose by less than --min-rise. Start and end are each the mean of five steps.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1]))

from grpo_trainer.metrics.rows import ENDS, read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--min-rise", type=float, default=float("-inf"))
    asked = parser.parse_args()
    rows = read_rows(asked.run_dir / "metrics.jsonl")
    rewards = [row["reward/mean"] for row in rows]
    start, end = fmean(rewards[:ENDS]), fmean(rewards[-ENDS:])
    summary = {
        "reward_start": round(start, 4),
        "reward_end": round(end, 4),
        "steps": rows[-1]["step"],
        "seconds": round(sum(row["train/seconds"] for row in rows), 1),
        "run_dir": str(asked.run_dir),
    }
    print(json.dumps(summary))
    if end - start < asked.min_rise:
        sys.exit(f"the reward rose by {end - start:.3f}, wanted {asked.min_rise} or more; see {asked.run_dir}")


if __name__ == "__main__":
    main()
