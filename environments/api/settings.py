"""Settings of the rollout API."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from environments.api.errors import SettingsError
from grpo_common.gate import is_loopback


@dataclass(frozen=True)
class Settings:
    """How `python -m environments.api` serves; its `--help` says what each setting means."""

    host: str = "127.0.0.1"
    port: int = 8000
    store: Path | None = None
    run_dir: Path | None = None
    fsync: bool = False
    env_timeout: float = 60.0
    api_key: str | None = None
    max_body_mb: int = 64
    max_queued_mb: int = 4096
    cors_origins: Sequence[str] = ()

    @property
    def report(self) -> Path | None:
        """Where `grpo report` writes the run's report."""
        return self.run_dir / "report.html" if self.run_dir else None

    def __post_init__(self) -> None:
        if not self.api_key and not is_loopback(self.host):
            raise SettingsError(
                "anyone who reaches it could post groups or reset the run",
                field="--host",
                got=f"{self.host} without a key",
                fix="give --api-key KEY, or --host 127.0.0.1",
            )
        for name, got, fits, wanted in (
            ("--env-timeout", self.env_timeout, self.env_timeout > 0, "more than 0 seconds"),
            ("--max-body-mb", self.max_body_mb, self.max_body_mb >= 1, "1 or more"),
            ("--max-queued-mb", self.max_queued_mb, self.max_queued_mb >= 1, "1 or more"),
            ("--port", self.port, 0 <= self.port <= 65535, "0 to 65535"),
        ):
            if not fits:
                raise SettingsError(field=name, got=got, wanted=wanted)
