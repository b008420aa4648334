"""The folder of a run: its files and what they hold."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from throughtime._files import write_atomically
from throughtime.app.config import Config, make_config, read_toml
from throughtime.errors import RunError


@dataclass(frozen=True)
class RunFolder:
    """The files of a run.

    `config.toml`, `model.safetensors`, `checkpoint.safetensors`, `metrics.jsonl`,
    `scores-SPLIT.json`, `audit.json`, `report.html`.
    """

    path: Path

    @classmethod
    def check_free(cls, config: Config) -> "RunFolder":
        """The folder that a new run will have.

        Raises:
            RunError: it holds a run already, or is a file.
        """
        folder = cls(Path(config.out))
        if folder.path.exists() and not folder.path.is_dir():
            raise RunError(
                f"{folder.path}: is a file; choose another --out, a folder that does not exist yet"
            )
        if folder.config.exists():
            raise RunError(
                f"{folder.path}: holds a run already; continue it with --resume {folder.path}, or"
                " choose another --out"
            )
        return folder

    @classmethod
    def create(cls, config: Config) -> "RunFolder":
        """A new folder with the resolved settings."""
        folder = cls.check_free(config)
        write_atomically(folder.config, config.to_toml().encode())
        return folder

    @property
    def config(self) -> Path:
        """The resolved settings."""
        return self.path / "config.toml"

    @property
    def model(self) -> Path:
        """Weights and description: all that is needed to run the model."""
        return self.path / "model.safetensors"

    @property
    def checkpoint(self) -> Path:
        """All that a run needs to resume: weights, optimizer, state, position, random state."""
        return self.path / "checkpoint.safetensors"

    @property
    def metrics(self) -> Path:
        """The log: one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        """The HTML page."""
        return self.path / "report.html"

    def scores(self, split: str) -> Path:
        """The scores that `eval` wrote for a split."""
        return self.path / f"scores-{split}.json"

    @property
    def audit(self) -> Path:
        """The results of `audit`."""
        return self.path / "audit.json"

    def read_config(self) -> Config:
        """The settings of the run.

        Raises:
            RunError: the folder holds no run.
        """
        if not self.config.is_file():
            raise RunError(
                f"{self.path}: no run there (no {self.config.name}); give the folder that"
                " `throughtime train --out` wrote"
            )
        return make_config(read_toml(self.config), source=str(self.config))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of the log; a last line cut short by a kill is dropped."""
        if not self.metrics.is_file():
            return []
        lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def remove_temporary_files(self) -> None:
        """Remove files that a kill in the middle of a write has left."""
        for path in self.path.glob("*.tmp"):
            path.unlink()

    def remove_scores(self) -> None:
        """Remove scores of a model that is about to change."""
        for path in self.path.glob("scores-*.json"):
            path.unlink()

    def truncate_metrics(self, count: int) -> None:
        """Drop the lines written after the checkpoint from which the run resumes."""
        if self.metrics.is_file():
            lines = self.metrics.read_bytes().splitlines(keepends=True)
            write_atomically(self.metrics, b"".join(lines[:count]))

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        """Append a line to the log."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
