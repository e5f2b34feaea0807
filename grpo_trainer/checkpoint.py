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
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file

from grpo_trainer.config import CheckpointConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import whole_folder, write_bytes
from grpo_trainer.model.lora import CONFIG_FILE, WEIGHTS_FILE, adapter_state, save_adapter

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
        self._device = next(model.parameters()).device

    def maybe_save(self, progress: Progress) -> None:
        """Save if `--checkpoint-interval` says so."""
        interval = self._config.checkpoint_interval
        if interval and progress.step % interval == 0:
            self.save(progress)

    def save(self, progress: Progress, name: str | None = None) -> Path:
        """Write a checkpoint, then prune older ones to `--keep-checkpoints`."""
        path = self._config.save_path / (name or f"adapter_step_{progress.step}")
        generators = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self._device)
        with whole_folder(path) as folder:
            save_adapter(self._model, folder)
            tensors = io.BytesIO()
            torch.save({"optimizer": self._optimizer.state_dict(), "generators": generators}, tensors)
            write_bytes(folder / TENSORS_FILE, tensors.getvalue())
            write_bytes(folder / STATE_FILE, json.dumps(asdict(progress)).encode())
        log.info("saved %s", path)
        self._prune(path)
        return path

    def resume(self) -> Progress:
        """Load what `--resume` names; the start of a new run when there is nothing to resume.

        Raises:
            ConfigError: the named checkpoint is none or incomplete, was made with other adapter options, or newer ones
                lie in `--save-path`.
        """
        path = self._wanted()
        if path is None:
            return Progress()
        for file in (STATE_FILE, WEIGHTS_FILE, CONFIG_FILE, TENSORS_FILE):
            if not (path / file).is_file():
                raise ConfigError(f"--resume {path}: no checkpoint there (wanted a folder with {file})")
        progress = Progress(**json.loads((path / STATE_FILE).read_text()))
        newer = [found.name for step, found in self._saved() if step > progress.step]
        if newer:
            raise ConfigError(
                f"--resume {path}: step {progress.step}, but {self._config.save_path} holds newer checkpoints "
                f"({', '.join(newer)}), which the run would mix with; move them away, or choose another --save-path"
            )
        self._check_adapter(path)
        set_peft_model_state_dict(self._model, load_file(path / WEIGHTS_FILE))
        tensors = torch.load(path / TENSORS_FILE, map_location="cpu", weights_only=True)
        self._load_optimizer(tensors["optimizer"])
        torch.set_rng_state(tensors["generators"]["cpu"])
        if "cuda" in tensors["generators"] and self._device.type == "cuda":
            torch.cuda.set_rng_state(tensors["generators"]["cuda"], self._device)
        log.info("resumed %s: step %d, policy version %d", path, progress.step, progress.policy_version)
        return progress

    def _check_adapter(self, path: Path) -> None:
        """The saved adapter must be of this run's kind: PEFT itself loads what fits and keeps silent about the rest."""
        saved = json.loads((path / CONFIG_FILE).read_text())
        own = self._model.peft_config["default"]
        assert isinstance(own, LoraConfig)
        pairs = {
            "--lora-r": (saved["r"], own.r),
            "--lora-alpha": (saved["lora_alpha"], own.lora_alpha),
            "--lora-target-modules": (sorted(saved["target_modules"]), sorted(own.target_modules or ())),
        }
        for flag, (was, now) in pairs.items():
            if was != now:
                raise ConfigError(
                    f"--resume {path}: made with another adapter: {flag} was {was}, is {now}; give it as it was"
                )
        with safe_open(path / WEIGHTS_FILE, "pt") as weights:
            names = set(weights.keys())
        if names != set(adapter_state(self._model)):
            raise ConfigError(f"--resume {path}: made with another adapter: its modules are not this model's")

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """Moments and step counts come from the checkpoint, hyperparameters from the flags."""
        wanted = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(state)
        for group, options in zip(self._optimizer.param_groups, wanted, strict=True):
            group.update(options)

    def _wanted(self) -> Path | None:
        match self._config.resume:
            case "never":
                return None
            case "auto":
                saved = self._saved()
                if not saved:
                    log.info("--resume auto: no checkpoint in %s, starting anew", self._config.save_path)
                return saved[-1][1] if saved else None
            case path:
                return Path(path)

    def _saved(self) -> list[tuple[int, Path]]:
        """All whole checkpoints by step, the final one among them, oldest first."""
        files = self._config.save_path.glob(f"adapter_*/{STATE_FILE}")
        return sorted((json.loads(file.read_text())["step"], file.parent) for file in files)

    def _prune(self, newest: Path) -> None:
        keep = self._config.keep_checkpoints
        steps = [path for _, path in self._saved() if path.name != FINAL]
        for path in steps[:-keep] if keep else []:
            if path == newest:
                continue
            shutil.rmtree(path)
            log.info("pruned %s", path)
