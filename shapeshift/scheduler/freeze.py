"""The switch that freezes the sidecar: decisions are still logged, nothing is done. It lasts until it is thawed."""

from __future__ import annotations

from pathlib import Path

from shapeshift.errors import ShapeshiftError

FILE = "scheduler.freeze"


def is_frozen(run_directory: Path) -> bool:
    """Whether the sidecar of this run directory may do nothing."""
    return (run_directory / FILE).exists()


def freeze(run_directory: Path) -> None:
    """Freeze, also a sidecar that is started later. Raises ShapeshiftError where the file cannot be written."""
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        (run_directory / FILE).touch()
    except OSError as error:
        raise ShapeshiftError(f"cannot write {run_directory / FILE}: {error.strerror}") from error


def thaw(run_directory: Path) -> None:
    """Let the sidecar work again. Raises ShapeshiftError where the file cannot be removed."""
    try:
        (run_directory / FILE).unlink(missing_ok=True)
    except OSError as error:
        raise ShapeshiftError(f"cannot remove {run_directory / FILE}: {error.strerror}") from error
