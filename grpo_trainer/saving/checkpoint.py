"""Checkpoints: everything that a run needs to continue, in a folder that is complete or absent.

step_12/                      the prefix depends on what is trained, see `policy.py`
    …                         the trained weights, in the format of transformers or PEFT
    trainer_state.pt          optimizer, random generators, exact values of weights that the above rounds
    optimizer_states/         the optimizer's states, if the weights are sharded over several processes
    state.json                step, policy version, checksums; written last: a folder without it is no checkpoint

A thread writes them from a copy in main memory while training continues (`background.py`). If a checkpoint is due while
another is being written, it waits until that one is complete. Training never waits for the disk.

Of several trainer processes, all call the same methods together. Rank 0 writes. If each has a part of the weights or of
the optimizer's states, all gather the former for rank 0, and each writes its part of the latter.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_common.status import NOTICE
from grpo_common.trace import stage
from grpo_trainer.config.train import CheckpointConfig
from grpo_trainer.errors import ConfigError, from_os_error
from grpo_trainer.files import folders_named, remove_remains, whole_folder, write_tensors
from grpo_trainer.metrics.health import duration
from grpo_trainer.metrics.types import Metrics, Sum
from grpo_trainer.optim.adamw import AdamW
from grpo_trainer.optim.steps import NormHistory
from grpo_trainer.parallel.shard_states import Place, read_states, reshard_states, whole_parts
from grpo_trainer.parallel.strategies import Divided, ShardedStates, TensorShards
from grpo_trainer.parallel.world import World
from grpo_trainer.policy import Adapter, AllWeights, Policy
from grpo_trainer.saving.background import BackgroundWriter, Schedule, Snapshot
from grpo_trainer.saving.manifest import (
    STATE_FILE,
    DamagedError,
    Progress,
    SavedCheckpoint,
    check_files,
    newest_whole,
    read_state,
    saved_checkpoints,
    seal,
)

log = logging.getLogger(__name__)

TENSORS_FILE = "trainer_state.pt"


@dataclass(eq=False, repr=False)
class Checkpoints:
    """Writes, prunes and loads a run's checkpoints."""

    config: CheckpointConfig
    policy: Policy
    """The trained policy."""
    optimizer: AdamW
    """The optimizer of its parameters."""
    norms: NormHistory = field(default_factory=lambda: NormHistory(0.0))
    """History of gradient norms."""
    shards: ShardedStates | None = None
    """This process's shards; None: neither weights nor optimizer states are sharded."""
    snapshot: Snapshot = field(default_factory=Snapshot)
    """The copy that is written in the background."""
    clock: Callable[[], float] = time.monotonic
    """Clock in seconds, for checkpoints by time."""
    world: World = field(default_factory=World)
    """The processes that train together."""
    safe: Progress | None = None
    """Progress of the newest complete checkpoint; None: there is none yet. As the next, only rank 0 knows it."""
    safe_path: Path | None = None
    """Folder of that checkpoint."""
    _weights: tuple[int, Path] | None = None
    """Version and folder of the last written weights."""
    _serving: Path | None = None
    _write_seconds: float | None = None

    def __post_init__(self) -> None:
        self._device = next(self.policy.model.parameters()).device
        self._writer = BackgroundWriter()
        self._schedule = Schedule(self.config.interval_steps, self.config.interval_seconds, self.clock)

    # Saving

    def maybe_save(self, progress: Progress) -> Metrics:
        """Begin a checkpoint if one is due and none is being written, in the background if there is room for a copy.

        The metrics are the time that training waited, and the time to write the last checkpoint since the last call.

        Raises:
            OSError: the last checkpoint could not be written.
        """

        def is_due() -> bool:
            self._writer.check()
            self._forget_deleted()
            return not self._writer.is_busy and self._schedule.is_due(progress.step)

        if self.shards is None:
            return self.world.lead(lambda: {**(self._start(progress) if is_due() else {}), **self._took()})
        if not self.world.lead(is_due):
            return self._took()
        started = time.perf_counter()
        self._write(self._path(progress.step), progress, self._tree())
        return {**self._begun(progress.step, time.perf_counter() - started), **self._took()}

    def _begun(self, step: int, waited: float) -> Metrics:
        self._schedule.begun(step, waited)
        return {"train/save_time": Sum(waited)}

    def _took(self) -> Metrics:
        seconds, self._write_seconds = self._write_seconds, None
        return {} if seconds is None else {"checkpoint/write_time": Sum(seconds)}

    def _start(self, progress: Progress) -> Metrics:
        started = time.perf_counter()
        path = self._path(progress.step)
        tree = self._tree()
        in_background = self.config.background_writes
        if in_background and self.snapshot.wants_room(tree):
            self._writer.start(lambda: self._make_room(tree))
            return {}  # postponed until there is room
        copy = self.snapshot.take(tree) if in_background else None
        if copy is None:
            self._write(path, progress, tree)
        else:
            self.optimizer.hold = copy.precede
            self._writer.start(lambda: self._write(path, progress, copy.whole()))
        return self._begun(progress.step, time.perf_counter() - started)

    def _make_room(self, tree: dict[str, Any]) -> None:
        """Allocate the copy's memory. A thread uses the first GPU by default, so select the trainer's."""
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            self.snapshot.make_room(tree)

    def save(self, progress: Progress, *, final: bool = False) -> Path:
        """Write a checkpoint, then prune older ones to `--keep-checkpoints`; it is on the disk when this returns.

        Raises:
            OSError: this checkpoint or the last one could not be written.
        """
        path = self.config.save_path / self.policy.final_name if final else self._path(progress.step)

        def complete() -> Path | None:
            """Return the folder of a complete checkpoint, which is never written again."""
            self._writer.wait()
            self._forget_deleted()
            safe, now = self.safe, (progress.step, progress.policy_version)
            is_there = safe is not None and (safe.step, safe.policy_version) == now
            if is_there and (not final or self.safe_path == path):
                return self.safe_path
            if self.shards is None:
                self._write(path, progress, self._tree())
                return path
            return None

        if (written := self.world.lead(complete)) is not None:
            return written
        self._write(path, progress, self._tree())
        return path

    def _forget_deleted(self) -> None:
        """Forget the newest checkpoint if its folder was deleted, and make another one due."""
        if self.safe_path is None or (self.safe_path / STATE_FILE).exists():
            return
        if self.config.saves:
            log.warning("%s, the newest checkpoint, was deleted: another one is written", self.safe_path)
            self._schedule.demand()
        self.safe = self.safe_path = None

    def settled(self, progress: Progress) -> tuple[str, ...]:
        """Return the batches that may be acknowledged: those in a checkpoint, or all if none is written on the way."""
        if not (self.config.interval_steps or self.config.interval_seconds):
            return progress.batches
        return self.safe.batches if self.safe is not None else ()

    def close(self, seconds: float | None = None) -> None:
        """Wait for the checkpoint that is being written, for at most `seconds`.

        Raises:
            OSError: it could not be written.
        """
        if self._writer.wait(seconds):
            self.snapshot.close()

    def _tree(self) -> dict[str, Any]:
        """Return everything that is saved. The tensors are not copies: the next update changes them."""
        whole, by_rank = None, None  # each process writes its part of the optimizer's states
        if self.shards is None:
            whole = self.optimizer.state_dict()
        else:  # each rank rounds its shard with its own random numbers; replicas must round alike
            by_rank = self.world.gather(generator_states(self._device))
        if isinstance(self.shards, TensorShards):
            whole = self.shards.states(self.optimizer)
        return {
            "optimizer": whole,
            "optimizer_kind": self.optimizer.kind,
            "trained": self._trained(),
            "gradient_norms": self.norms.norms,
            "generators": generator_states(self._device),
            "generators_by_rank": by_rank,
            "weights": self._prepared(self.weights_now()),
        }

    def _trained(self) -> list[str]:
        """Return the names of the trained parameters, in the optimizer's order; some may have no state yet."""
        return [name for name, parameter in self.policy.model.named_parameters() if parameter.requires_grad]

    @property
    def gathers(self) -> bool:
        """Whether `weights_now` gathers weights that are sharded over processes."""
        return isinstance(self.shards, Divided)

    def weights_now(self, keep: Callable[[Tensor], Tensor] = Tensor.cpu) -> dict[str, Tensor]:
        """Return the trained weights by the names of `stored_tensors`: the model's own memory, or `Divided.tensors`."""
        return self.shards.tensors(keep) if isinstance(self.shards, Divided) else self.policy.tensors()

    def _prepared(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that the optimizer's states belong to: prepared ones that a fence did not let in."""
        if not self.optimizer.prepared:
            return weights
        new = {own.data_ptr(): own.grad for own in self.policy.model.parameters() if own.grad is not None}
        return {name: new.get(own.data_ptr(), own).to(own.dtype) for name, own in weights.items()}

    def _write(self, path: Path, progress: Progress, tree: dict[str, Any]) -> None:
        """Write a checkpoint: rank 0 alone, possibly in a thread, or all processes if each writes its part."""
        started = time.perf_counter()
        weights: dict[str, Tensor] = tree["weights"]
        with stage("save", step=progress.step), ExitStack() as opened:

            def begin() -> Path:
                folder = opened.enter_context(self._with_weights(progress.policy_version, path, weights))
                write_tensors(folder / TENSORS_FILE, {**tree, "weights": self.policy.exact(weights)})
                return folder

            def end(folder: Path) -> None:
                seal(folder, progress)
                opened.close()
                self.safe, self.safe_path = progress, path
                self._write_seconds = time.perf_counter() - started
                log.info("checkpoint saved: %s", path, extra=NOTICE)
                self._prune(path)

            if self.shards is None:
                end(begin())
            else:
                folder = self.world.lead(begin)
                self.shards.save_states(folder, self.optimizer)
                self.world.lead(lambda: end(folder))

    @contextmanager
    def _with_weights(self, version: int, path: Path, weights: Mapping[str, Tensor]) -> Iterator[Path]:
        """Yield a folder with the weights, for further files. A sealed folder is replaced and never written into."""
        if self._weights == (version, path) and path.is_dir() and not (path / STATE_FILE).exists():  # from `export`
            yield path
        else:
            with whole_folder(path) as folder:
                self.policy.write(folder, weights)
                yield folder

    def _path(self, step: int) -> Path:
        return self.config.save_path / f"{self.policy.step_prefix}{step}"

    # For a server that starts on the trained weights

    def export(self, version: int) -> Path:
        """Return a folder with the trained weights, which are of this policy version; write it if there is none.

        A version equals its step unless steps were skipped. A checkpoint of that step is never overwritten.
        """

        def written() -> Path | None:
            self._writer.wait()
            kept = self._weights
            return kept[1] if kept is not None and kept[0] == version and kept[1].is_dir() else None

        def write(weights: Mapping[str, Tensor]) -> Path:
            path = self._path(version)
            if (path / STATE_FILE).exists():
                path = path.with_name(f"version_{version}")
            with whole_folder(path) as folder:
                self.policy.write(folder, weights)
            self._weights = (version, path)
            return path

        if (path := self.world.lead(written)) is not None:
            return path
        weights = self.weights_now()
        return self.world.lead(lambda: write(weights))

    def serving(self, path: Path | None) -> None:
        """Record that a server has loaded this folder: keep it, and delete the last one. None: no server runs."""
        self._writer.wait()
        before, self._serving = self._serving, path
        if before is not None and self.config.keep_checkpoints and not (before / STATE_FILE).exists():
            with suppress(FileNotFoundError):  # already deleted by the user
                shutil.rmtree(before)
                log.info("pruned %s", before)
        self._prune(path)

    def _remove_exports(self) -> None:
        """Delete exports of an earlier process that are no checkpoints: its servers have ended with it."""
        if self.policy.step_prefix != AllWeights.step_prefix or not self.config.keep_checkpoints:
            return
        names = rf"(?:{AllWeights.step_prefix}|version_)\d+"
        for path in folders_named(self.config.save_path, names, containing=self.policy.marker):
            own = self._weights is not None and path == self._weights[1]
            if not own and not (path / STATE_FILE).exists():
                shutil.rmtree(path)
                log.info("pruned %s", path)

    # Resuming

    def resume(self, say: Callable[[str], None] = log.info) -> Progress:
        """Load the checkpoint that `--resume` names; return the start of a new run if there is nothing to resume.

        With `auto`, damaged checkpoints are moved aside, and the newest undamaged one is loaded. This also creates
        `--save-path`, because environments learn of it when they register and keep their own state in it. `say` reports
        which checkpoint was resumed, and which were not and why.

        Raises:
            ConfigError: the named folder is no checkpoint, or is damaged; it was made with other options or in another
                mode; or `--save-path` has newer checkpoints.
            FormatError: a newer version of this program wrote a checkpoint. The folder is as it was.
        """
        saved = self.world.lead(lambda: self._to_load(say))
        if saved is None:
            return Progress()
        self.load(saved.path)
        progress = saved.progress
        path = self.world.lead(lambda: self._own(saved))
        self._schedule.begun(progress.step)
        if self.world.leads:
            self.safe, self.safe_path = progress, path
            self._weights = (progress.policy_version, path)
            size = sum(size for size, _ in saved.files.values()) / 1e6
            say(
                f"resumed {saved.path}: step {progress.step}, policy version {progress.policy_version}, saved "
                f"{duration(max(0.0, time.time() - saved.saved_at))} ago, {len(saved.files)} files, {size:.1f} MB, "
                "checksums right"
            )
        return progress

    def _to_load(self, say: Callable[[str], None]) -> SavedCheckpoint | None:
        """Return the checkpoint to load; None: a new run starts."""
        folder = self.config.save_path
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            known = from_os_error(error, "create the folder of checkpoints")
            raise known or ConfigError(
                f"the folder can't be created: {error.strerror}",
                field="--save-path",
                got=folder,
                wanted="a folder to write to",
                fix="choose another",
            ) from None
        saved_checkpoints(self.config.save_path)  # before anything is moved or deleted: all are of a known format
        if self.config.resume == "never":
            return None
        for kind in (Adapter, AllWeights):
            remove_remains(self.config.save_path, rf"{kind.step_prefix}\d+|version_\d+|{kind.final_name}")
        self._remove_exports()
        if self.config.resume != "auto":
            return self._named(Path(self.config.resume))
        if (saved := newest_whole(self.config.save_path, say)) is None:
            say(f"--resume auto: no checkpoint in {self.config.save_path}, starting at step 0")
        else:
            self._check_kind(saved.path)
        return saved

    def _own(self, saved: SavedCheckpoint) -> Path:
        """Return the checkpoint's folder in `--save-path`: `--resume auto` needs it there before there is a newer one.

        That of another run is linked there, or copied to another file system: its files never change.
        """
        there = [each.path for each in saved_checkpoints(self.config.save_path) if each.files == saved.files]
        if there or not self.config.saves:
            return saved.path if saved.path in there or not there else there[-1]
        path = self._path(saved.progress.step)
        with whole_folder(path) as folder:
            for name in (*saved.files, STATE_FILE):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(saved.path / name, folder / name)
                except OSError:  # another file system, or one without links
                    shutil.copyfile(saved.path / name, folder / name)
        return path

    def _named(self, path: Path) -> SavedCheckpoint:
        self._check_kind(path)
        try:
            saved = read_state(path)
            check_files(saved)
        except DamagedError as damage:
            fix, why = "use --resume auto to continue from the newest whole one", "the checkpoint is damaged"
            raise _refused(path / damage.field, damage.got, damage.wanted, fix, why) from None
        step, own = saved.progress.step, saved_checkpoints(self.config.save_path)
        is_there = any(one.files == saved.files for one in own)
        others = [one.path.name for one in own if one.progress.step >= step + is_there]
        if others:
            why = f"the run would mix with other checkpoints in {self.config.save_path}"
            fix = "move them away, or choose another --save-path"
            raise _refused(path, ", ".join(others), f"none of step {step + is_there} or later", fix, why)
        return saved

    def load(self, path: Path) -> None:
        """Load weights, optimizer and random generators of a complete checkpoint.

        Raises:
            ConfigError: it was made with another optimizer or other options, or its optimizer's states can't be read.
        """
        tensors = torch.load(path / TENSORS_FILE, map_location="cpu", weights_only=True, mmap=True)
        kind = tensors["optimizer_kind"]
        if kind != self.optimizer.kind:
            fix = "give --optimizer, --master-weights and --dtype as they were"
            raise _refused(path, kind, self.optimizer.kind, fix, "made with another optimizer")
        self.policy.load(path, tensors["weights"])
        # With other trained parameters, states would be matched wrongly or be missing.
        then = tensors["trained"]
        now = self._trained()
        if then != now:
            got = _few(set(then) - set(now), "not trained now")
            wanted = _few(set(now) - set(then), "trained only now")
            fix, why = "give --train-layer-indices as it was", "made with other trained parameters"
            raise _refused(path, got, wanted, fix, why)
        # Moments and step counts come from the checkpoint, hyperparameters from the flags.
        wanted = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(self._own_states(path, tensors["optimizer"]))
        for group, options in zip(self.optimizer.param_groups, wanted, strict=True):
            group.update(options)
        self.norms.restore(tensors["gradient_norms"])
        by_rank = tensors.get("generators_by_rank") or ()  # checkpoints of earlier versions have none
        own = self.shards is not None and len(by_rank) == self.world.size
        generators = by_rank[self.world.rank] if own else tensors["generators"]
        torch.set_rng_state(generators["cpu"].clone())
        random.setstate(generators["python"])
        name, keys, *rest = generators["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        # A checkpoint that was made without a GPU has no GPU's generator.
        if "cuda" in generators and self._device.type == "cuda":
            torch.cuda.set_rng_state(generators["cuda"].clone(), self._device)

    def _own_states(self, path: Path, whole: dict[str, Any] | None) -> dict[str, Any]:
        """Return this process's optimizer states: from `whole` if one process wrote them, else from files."""
        if whole is not None and self.shards is None:
            return whole
        if isinstance(self.shards, TensorShards):
            found = read_states(path, self.shards.whole_parts(), Place()) if whole is None else whole["state"]
            return {**self.optimizer.state_dict(), "state": self.shards.own_states(found)}
        parts = whole_parts(self.policy.model) if self.shards is None else self.shards.parts
        place = Place() if self.shards is None else self.shards.place
        states = read_states(path, parts, place) if whole is None else reshard_states(whole["state"], parts)
        return {**self.optimizer.state_dict(), "state": states}

    def _check_kind(self, path: Path) -> None:
        for file in (STATE_FILE, TENSORS_FILE):
            if not (path / file).is_file():
                raise ConfigError("no checkpoint there", field="--resume", got=path, wanted=f"a folder with {file}")
        if not (path / self.policy.marker).is_file():
            others = [kind.kind for kind in (Adapter, AllWeights) if (path / kind.marker).is_file()]
            got, why = " and ".join(others) or "no weights", "this --weight-bridge-mode trains something else"
            fix = "choose the mode that it was made in, or another --save-path"
            raise _refused(path, got, self.policy.kind, fix, why)

    # Pruning

    def _prune(self, newest: Path | None) -> None:
        keep = self.config.keep_checkpoints
        paths = [found.path for found in saved_checkpoints(self.config.save_path)] if keep else []
        for path in [path for path in paths if path.name != self.policy.final_name][:-keep]:
            if path in (newest, self._serving) or path.is_symlink():
                continue
            with suppress(FileNotFoundError):  # already deleted by the user
                shutil.rmtree(path)
                log.info("pruned %s", path)


# ---------------------------------------------------------------- random generators


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, numpy's, torch's and the GPU's generators, as `torch.load(weights_only=True)`
    accepts them."""
    name, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys, np.int64)), *rest),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def seed_generators(seed: int) -> None:
    """Seed all generators with `--seed`."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)  # the GPUs' too


def _refused(path: Path, got: str, wanted: str, fix: str, why: str) -> ConfigError:
    return ConfigError(why, field=f"--resume {path}", got=got, wanted=wanted, fix=fix)


def _few(names: set[str], what: str) -> str:
    """Return `12 not trained now, such as a, b, c`."""
    return f"{len(names)} {what}" + (f", such as {', '.join(sorted(names)[:3])}" if names else "")
