"""`python -m tests.integration.killed_sender URL MODEL FOLDER STAGING`: a trainer that kills itself while it sends.

It prints the version that the server has, and is dead at the third bucket of the next one.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_trainer.weights import layout
from grpo_trainer.weights.layout import ModelLayout
from tests.integration.serving import Serving
from tests.integration.test_broadcast import Sending


def main(url: str, model: str, folder: str, staging: str) -> None:
    server = Serving(url, Path(model), Path(folder), Path(folder), process=None)  # pyright: ignore[reportArgumentType]
    layout.BUCKET_BYTES = 4096  # pyright: ignore[reportConstantRedefinition]
    made = Sending(server, Path(folder), broadcast_transport="gloo", broadcast_staging=staging)
    version = made.bridge.connect(0)
    made.step()
    print(version, flush=True)
    pack = ModelLayout.pack

    def pack_two(self: ModelLayout, number: int, stored: Any, buffer_E: Tensor) -> Tensor:
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return pack(self, number, stored, buffer_E)

    ModelLayout.pack = pack_two
    made.bridge.publish(version + 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
