"""Engines from Debian's packages, installed when a test first needs them."""

import os
import shutil
import subprocess

import pytest


def install(*packages: str, needs: tuple[str, ...]) -> None:
    """Sees to it that programs are there; skips the test, saying why, where they cannot be."""
    if "/usr/sbin" not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += os.pathsep + "/usr/sbin"
    if all(map(shutil.which, needs)):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"{' '.join(packages)} cannot be installed: that needs root and apt-get")
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(
            ["apt-get", *words], env=environ, capture_output=True, text=True, check=False
        )
    if done.returncode or not all(map(shutil.which, needs)):
        reason = (done.stderr.strip() or "a program is missing").splitlines()[-1]
        pytest.skip(f"{' '.join(packages)} cannot be installed: {reason}")
