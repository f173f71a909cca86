"""The sidecar as a child process of the command that starts the server."""

from __future__ import annotations

from shapeshift.child_process import ChildProcess
from shapeshift.sidecar import run_files
from shapeshift.triton.settings import ServerSettings

LOG_FILE = "sidecar.log"


class SidecarProcess(ChildProcess):
    """`shapeshift sidecar` for the server with these settings; it logs to `LOG_FILE` in the run directory."""

    def __init__(self, settings: ServerSettings, plan_period_s: float) -> None:
        self._run_directory = settings.run_directory
        options = {
            "--build": settings.run_directory.parent,
            "--server": settings.grpc_url,
            "--metrics": settings.metrics_url,
            "--plan-period": plan_period_s,
        }
        arguments = [f"{name}={value}" for name, value in options.items()]
        arguments += [f"--repository={folder}" for folder in settings.repositories]
        super().__init__("sidecar", arguments, settings.run_directory / LOG_FILE, settings.shared_variables)

    def has_settled(self) -> bool:
        """Whether the sidecar has loaded the workers of the first plan, or has logged why it could not."""
        report = run_files.read_report(self._run_directory)
        return report.get("settled") is True and report.get("pid") == run_files.lock_holder(self._run_directory)
