"""A benchmark's results: the machine, flat rows, and the forms that gave wrong answers."""

import csv
import dataclasses
import datetime
import json
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from vllm_dsa import __version__
from vllm_dsa.deep_gemm_wrapper import PagedMQALogitsCapabilities
from vllm_dsa.platform import current_device

# A dataclass of scalars.
Row = TypeVar("Row")


@dataclass(slots=True)
class BenchReport(Generic[Row]):
    """What a benchmark found.

    Attributes
    ----------
    environment : dict
        The machine, the libraries and the command, as text.
    rows : list
        One dataclass of scalars for each measurement.
    errors : list of str
        Forms whose answer was wrong; they have no row.
    """

    environment: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"environment": self.environment, "rows": self._row_dicts(), "errors": self.errors}

    def write_json(self, path: Path) -> None:
        """Write everything; overwrites."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    def write_csv(self, path: Path) -> None:
        """Write the rows under ``# key: value`` lines of the environment and the errors; overwrites."""
        rows = self._row_dicts()
        with path.open("w", encoding="utf-8", newline="") as file:
            file.writelines(f"# {key}: {value}\n" for key, value in self.environment.items())
            file.writelines(f"# error: {error}\n" for error in self.errors)
            writer = csv.DictWriter(file, list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)

    def _row_dicts(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(row) for row in self.rows]  # type: ignore[call-overload]


def environment(command: str, caps: PagedMQALogitsCapabilities) -> dict[str, str]:
    """Return date, device, library versions and the command that repeats the benchmark."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{current_device().name}, {caps.num_sms} SMs",
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
        "triton": _version("triton"),
        "vllm-dsa": __version__,
        "deep_gemm": f"{caps.provider or 'none'} {caps.version or ''}".strip(),
        "native_next_n": caps.native_text,
        "command": command,
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
