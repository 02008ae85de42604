import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_is_in_the_wheel():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    homes = [path.parent for top in ("longstraw", "analysis", "hydra_plugins") for path in (ROOT / top).rglob("*.py")]
    there = {".".join(home.relative_to(ROOT).parts) for home in homes}
    assert listed == there | {"longstraw.conf"}


def test_the_plugin_namespace_is_one():
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()
    assert (ROOT / "hydra_plugins" / "longstraw_launcher" / "__init__.py").is_file()
