"""`shapeshift cascade` and the place of its registry."""

from __future__ import annotations

import pytest

from shapeshift.cli.main import main


def test_a_registry_is_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cascade", "list", "--dir", "s3://bucket/candidates"]) == 2
    assert "dir: got 's3://bucket/candidates'; a folder, such as a bucket" in capsys.readouterr().err
