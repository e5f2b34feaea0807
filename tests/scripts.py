"""Programs of scripts/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from tests.processes import ROOT


def load_script(name: str) -> Any:
    """Import scripts/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
