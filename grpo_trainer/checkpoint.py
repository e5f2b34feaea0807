"""Checkpoints: everything that a run needs to go on, whole or not there.

adapter_step_12/
    adapter_model.safetensors, adapter_config.json     what PEFT and vLLM load
    trainer_state.pt                                   optimizer, random generators
    state.json                                         step, policy version
"""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file

from grpo_trainer.config import CheckpointConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import whole_folder, write_bytes
from grpo_trainer.model.lora import WEIGHTS_FILE, save_adapter

log = logging.getLogger(__name__)

FINAL = "adapter_final"
STATE_FILE = "state.json"
TENSORS_FILE = "trainer_state.pt"


@dataclass(frozen=True)
class Progress:
    """Where a run stands: steps done, and the policy version that they led to."""

    step: int = 0
    policy_version: int = 0


class Checkpoints:
    """Writes, prunes and loads a run's checkpoints.

    Args:
        model: the adapter's model.
        optimizer: its optimizer.
    """

    def __init__(self, config: CheckpointConfig, model: PeftModel, optimizer: torch.optim.Optimizer) -> None:
        self._config = config
        self._model = model
        self._optimizer = optimizer

    def maybe_save(self, progress: Progress) -> None:
        """Save if `--checkpoint-interval` says so."""
        interval = self._config.checkpoint_interval
        if interval and progress.step % interval == 0:
            self.save(progress)

    def save(self, progress: Progress, name: str | None = None) -> Path:
        """Write a checkpoint, then prune older ones to `--keep-checkpoints`."""
        path = self._config.save_path / (name or f"adapter_step_{progress.step}")
        generators = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            generators["cuda"] = torch.cuda.get_rng_state()
        with whole_folder(path) as folder:
            save_adapter(self._model, folder)
            tensors = io.BytesIO()
            torch.save({"optimizer": self._optimizer.state_dict(), "generators": generators}, tensors)
            write_bytes(folder / TENSORS_FILE, tensors.getvalue())
            write_bytes(folder / STATE_FILE, json.dumps(asdict(progress)).encode())
        log.info("saved %s", path)
        self._prune()
        return path

    def resume(self) -> Progress:
        """Load what `--resume` names; the start of a new run when there is nothing to resume.

        Raises:
            ConfigError: the named checkpoint is none, or was made with other adapter options.
        """
        path = self._wanted()
        if path is None:
            return Progress()
        if not (path / STATE_FILE).is_file():
            raise ConfigError(f"--resume {path}: no checkpoint there (wanted a folder with {STATE_FILE})")
        progress = Progress(**json.loads((path / STATE_FILE).read_text()))
        adapter = load_file(path / WEIGHTS_FILE)
        try:
            set_peft_model_state_dict(self._model, adapter)
            tensors = torch.load(path / TENSORS_FILE, map_location="cpu", weights_only=True)
            self._optimizer.load_state_dict(tensors["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"--resume {path}: made with another adapter ({str(error).splitlines()[0]}); give the --lora options "
                "that it was trained with"
            ) from error
        torch.set_rng_state(tensors["generators"]["cpu"])
        if "cuda" in tensors["generators"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["generators"]["cuda"])
        log.info("resumed %s: step %d, policy version %d", path, progress.step, progress.policy_version)
        return progress

    def _wanted(self) -> Path | None:
        match self._config.resume:
            case "never":
                return None
            case "auto":
                newest = [path for _, path in self._numbered()][-1:]
                if not newest:
                    log.info("--resume auto: no checkpoint in %s, starting anew", self._config.save_path)
                return newest[0] if newest else None
            case path:
                return Path(path)

    def _numbered(self) -> list[tuple[int, Path]]:
        """The step checkpoints, oldest first."""
        found = [(re.fullmatch(r"adapter_step_(\d+)", path.name), path) for path in self._config.save_path.glob("*")]
        return sorted((int(match[1]), path) for match, path in found if match)

    def _prune(self) -> None:
        keep = self._config.keep_checkpoints
        for _, path in self._numbered()[: -keep or None] if keep else []:
            shutil.rmtree(path)
            log.info("pruned %s", path)
