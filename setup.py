"""Packs the wheel: the library, and inside it what a checkout keeps beside it (`shapeshift.installation` finds it)."""

import shutil

from setuptools import find_packages, setup
from setuptools.command.build import build


class CleanBuild(build):
    """Builds in a folder of its own that is empty first: modules of an earlier build would be packed as well."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = "build/wheel"

    def run(self) -> None:
        shutil.rmtree(self.build_base, ignore_errors=True)
        super().run()


setup(
    packages=[*find_packages(include=["shapeshift", "shapeshift.*"]), "shapeshift.backends", "shapeshift.requirements"],
    package_dir={"shapeshift.backends": "backends", "shapeshift.requirements": "requirements"},
    package_data={
        "shapeshift": ["py.typed"],
        "shapeshift.kernels": ["*.h"],
        "shapeshift.engines.native": ["kernels/*"],
        "shapeshift.fused_decode.model": ["kernels/*"],
        "shapeshift.adapter_cache.lora": ["kernels/*"],
        "shapeshift.fleet": ["templates/*.yaml"],
        "shapeshift.live": ["style.css"],
        "shapeshift.backends": ["*/model.py"],
        "shapeshift.requirements": ["server.txt"],
    },
    cmdclass={"build": CleanBuild},
)
