"""What the wheel holds: every package, and `conf/` where it is found."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("longstraw", "analysis", "hydra_plugins")


def test_every_package_is_in_the_wheel():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    homes = [path.parent for top in TOPS for path in (ROOT / top).rglob("*.py")]
    there = {".".join(home.relative_to(ROOT).parts) for home in homes}
    assert listed == there | {"longstraw.conf"}


def test_the_plugin_namespace_is_one():
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()
    assert (ROOT / "hydra_plugins" / "longstraw_launcher" / "__init__.py").is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, without the network, and unpack it; return the folder."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    for top in (*TOPS, "conf"):
        shutil.copytree(ROOT / top, source / top, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", source)
    (source / "README.md").touch()
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    unpacked = tmp_path_factory.mktemp("unpacked")
    (built,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(unpacked)
    return unpacked


@pytest.mark.slow
def test_the_wheel_holds_conf_and_finds_it(wheel, tmp_path):
    yaml = {path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("*.yaml")}
    assert {path.relative_to(wheel / "longstraw/conf") for path in (wheel / "longstraw/conf").rglob("*.yaml")} == yaml
    entry = (wheel / next(wheel.glob("*.dist-info")).name / "entry_points.txt").read_text()
    assert "longstraw = longstraw.__main__:main" in entry
    # As a console script does it, from a folder that is no checkout. Only a composed job can tell this reason.
    script = tmp_path / "longstraw"
    script.write_text("from longstraw.__main__ import main\nmain()\n")
    command = [sys.executable, str(script), "-m", "hardware=cpu", "seed=1,2", "context=100"]
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "jobs 0, 1: response_length=8192 leaves no prompt in context=100" in done.stderr
    assert done.returncode == 2
