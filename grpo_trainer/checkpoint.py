"""Checkpoints: everything that a run needs to go on, whole or not there.

step_12/                      named by what is trained, see `model/policy.py`
    …                         the trained weights, as others load them
    trainer_state.pt          optimizer, random generators, weights that the above rounds
    state.json                step, policy version; written last: a folder without it is no checkpoint
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_trainer.config import CheckpointConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import replace_file, whole_folder, write_tensors
from grpo_trainer.model.policy import Adapter, AllWeights, Policy
from grpo_trainer.optim import FusedAdamW, TwoPartOptimizer

log = logging.getLogger(__name__)

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
        policy: what is trained.
        optimizer: of its parameters.
    """

    def __init__(self, config: CheckpointConfig, policy: Policy, optimizer: TwoPartOptimizer) -> None:
        self._config = config
        self._policy = policy
        self._optimizer = optimizer
        self._device = next(policy.model.parameters()).device
        self._weights: tuple[int, Path] | None = None  # the version that a folder is known to hold
        self._serving: Path | None = None

    def maybe_save(self, progress: Progress) -> None:
        """Save if `--checkpoint-interval` says so."""
        interval = self._config.checkpoint_interval
        if interval and progress.step % interval == 0:
            self.save(progress)

    def save(self, progress: Progress, *, final: bool = False) -> Path:
        """Write a checkpoint, then prune older ones to `--keep-checkpoints`."""
        path = self._config.save_path / (self._policy.final_name if final else self._name(progress.step))
        generators = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self._device)
        state = {
            "optimizer": self._optimizer.state_dict(),
            "optimizer_kind": self._optimizer.kind,
            "generators": generators,
            "weights": self._policy.exact_weights(),
        }
        with self._with_weights(progress.policy_version, path) as folder:
            write_tensors(folder / TENSORS_FILE, state)
            replace_file(folder / STATE_FILE, json.dumps(asdict(progress)).encode())
        log.info("saved %s", path)
        self._prune(path)
        return path

    def export(self, version: int) -> Path:
        """A folder that holds the trained weights, which are of this policy version; written if there is none.

        Versions are steps, but for steps that were skipped: a checkpoint of that step is never overwritten.
        """
        if self._weights is None or self._weights[0] != version:
            path = self._config.save_path / self._name(version)
            if (path / STATE_FILE).exists():
                path = path.with_name(f"version_{version}")
            with whole_folder(path) as folder:
                self._policy.save(folder)
            self._weights = (version, path)
        return self._weights[1]

    def serving(self, path: Path) -> None:
        """A server has loaded this folder: it stays, and the one before may go."""
        before, self._serving = self._serving, path
        if before is not None and self._config.keep_checkpoints and not (before / STATE_FILE).exists():
            shutil.rmtree(before)
            log.info("pruned %s", before)
        self._prune(path)

    def _name(self, step: int) -> str:
        return f"{self._policy.step_prefix}{step}"

    @contextmanager
    def _with_weights(self, version: int, path: Path) -> Iterator[Path]:
        """A folder with the weights in it, to be added to."""
        if self._weights == (version, path):  # written for the server
            yield path
        else:
            with whole_folder(path) as folder:
                self._policy.save(folder)
                yield folder

    def resume(self) -> Progress:
        """Load what `--resume` names; the start of a new run when there is nothing to resume.

        Raises:
            ConfigError: the named checkpoint is none or incomplete, was made with other options or in another mode, or
                newer ones lie in `--save-path`.
        """
        path = self._wanted()
        if path is None:
            return Progress()
        self._check_kind(path)
        progress = Progress(**json.loads((path / STATE_FILE).read_text()))
        newer = [found.name for step, found in self._saved() if step > progress.step]
        if newer:
            raise ConfigError(
                f"--resume {path}: step {progress.step}, but {self._config.save_path} holds newer checkpoints "
                f"({', '.join(newer)}), which the run would mix with; move them away, or choose another --save-path"
            )
        tensors = torch.load(path / TENSORS_FILE, map_location="cpu", weights_only=True, mmap=True)
        kind = tensors.get("optimizer_kind", FusedAdamW.kind)
        if kind != self._optimizer.kind:
            raise ConfigError(
                f"--resume {path}: made with another optimizer: it was {kind}, is {self._optimizer.kind} (--optimizer, "
                "--master-weights, --dtype); give it as it was"
            )
        self._policy.load(path, tensors.get("weights", {}))
        self._load_optimizer(tensors["optimizer"])
        torch.set_rng_state(tensors["generators"]["cpu"].clone())
        if "cuda" in tensors["generators"] and self._device.type == "cuda":
            torch.cuda.set_rng_state(tensors["generators"]["cuda"].clone(), self._device)
        self._weights = (progress.policy_version, path)
        log.info("resumed %s: step %d, policy version %d", path, progress.step, progress.policy_version)
        return progress

    def _check_kind(self, path: Path) -> None:
        for file in (STATE_FILE, TENSORS_FILE):
            if not (path / file).is_file():
                raise ConfigError(f"--resume {path}: no checkpoint there (wanted a folder with {file})")
        if not (path / self._policy.marker).is_file():
            others = [kind.kind for kind in (Adapter, AllWeights) if (path / kind.marker).is_file()]
            raise ConfigError(
                f"--resume {path}: holds {' and '.join(others) or 'no weights'}, but this --weight-bridge-mode trains "
                f"{self._policy.kind}; choose the mode that it was made in, or another --save-path"
            )

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
        """All whole checkpoints by step, of any kind, the final ones among them, oldest first."""
        return sorted(
            (json.loads((path / STATE_FILE).read_text())["step"], path)
            for kind in (Adapter, AllWeights)
            for path in [*self._config.save_path.glob(f"{kind.step_prefix}*"), self._config.save_path / kind.final_name]
            if (path / STATE_FILE).is_file()
        )

    def _prune(self, newest: Path) -> None:
        keep = self._config.keep_checkpoints
        steps = [path for _, path in self._saved() if path.name != self._policy.final_name]
        for path in steps[:-keep] if keep else []:
            if path in (newest, self._serving):
                continue
            shutil.rmtree(path)
            log.info("pruned %s", path)
