"""What `make image` collects for the image."""

from __future__ import annotations

from pathlib import Path

from docker.image import materials, remove_others


def test_wheels_of_earlier_pins_are_removed(tmp_path: Path) -> None:
    versions = {one["name"]: one["version"] for one in materials()["components"]}
    pinned = [f"{name.replace('-', '_')}-{versions[name]}-py3-none-any.whl" for name in ("numpy", "torch")]
    for name in (*pinned, "numpy-1.0.1-py3-none-any.whl", "shapeshift-0.0.1-py3-none-any.whl"):
        (tmp_path / name).touch()
    remove_others(tmp_path)
    assert {wheel.name for wheel in tmp_path.iterdir()} == {*pinned}
