"""Transport `disk`: a PEFT checkpoint in a folder that the server reads, in the standard format of adapters."""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections import deque
from pathlib import Path

from grpo_trainer.errors import ServerError
from grpo_trainer.files import folders_named, remove_remains, whole_folder, write_bytes
from grpo_trainer.model.lora import CONFIG_FILE, WEIGHTS_FILE
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.packed import HostCopy, PackedAdapter
from grpo_trainer.weights.transports.transport import Sent
from vllm_server.protocol import LoraLoadRequest, Transport

log = logging.getLogger(__name__)


class Disk:
    """
    Args:
        root: the server's --lora-root.
        lora_name: first part of each version's name, by which our folders in `root` are recognised.
        keep: number of versions whose folders are kept; older ones are deleted. The folders of an earlier trainer
            count too, because the server may still serve its newest versions.
    """

    name: Transport = "disk"

    def __init__(self, packed: PackedAdapter, server: ServerClient, root: Path, lora_name: str, keep: int) -> None:
        self._host = HostCopy(packed)
        self._settings = json.dumps(packed.settings, indent=2).encode()
        self._server = server
        self._root = root
        self._keep = keep
        own = rf"{re.escape(lora_name)}-(?:v\d+|proof-[a-z]+-[0-9a-f]{{8}})"  # versions, and adapters of a proof
        remove_remains(root, own)
        self._folders = deque(folders_named(root, own, containing=WEIGHTS_FILE))

    def send(self, name: str, version: int, *, activate: bool) -> Sent:
        path = self._root / name
        request = LoraLoadRequest(
            adapter_path=str(path.absolute()), adapter_name=name, version=version, activate=activate
        )
        try:
            sent = self._deliver(path, request)
        except (FileNotFoundError, ServerError):
            if path.is_dir():
                raise
            self._drop_deleted()  # someone deleted the folder during the write or the load
            sent = self._deliver(path, request)
        self._drop_deleted()
        self._forget_old_folders()
        return sent

    def _deliver(self, path: Path, request: LoraLoadRequest) -> Sent:
        started = time.perf_counter()
        with whole_folder(path) as folder:
            write_bytes(folder / WEIGHTS_FILE, self._host.take())
            write_bytes(folder / CONFIG_FILE, self._settings)
        if path in self._folders:  # a resumed trainer sends its version again
            self._folders.remove(path)
        self._folders.append(path)
        packed = time.perf_counter() - started
        return Sent(self._server.load_adapter(request), packed)

    def _drop_deleted(self) -> None:
        deleted = [folder for folder in self._folders if not folder.is_dir()]
        if deleted:
            log.warning(
                "%s: deleted by another program. The server keeps the versions it has loaded",
                ", ".join(str(folder) for folder in deleted),
            )
        self._folders = deque(folder for folder in self._folders if folder not in deleted)

    def _forget_old_folders(self) -> None:
        while len(self._folders) > self._keep:
            folder = self._folders.popleft()
            try:
                shutil.rmtree(folder)
            except OSError as error:  # best effort: a leftover folder only costs disk space
                log.warning("could not delete %s: %s", folder, error)

    def close(self) -> None:
        """Keep the files of the newest versions, which the server may still serve."""
