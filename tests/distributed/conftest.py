"""The ``ranks`` fixture: processes of this machine that are started once and run one case after the other."""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
START_SECONDS, CASE_SECONDS = 180, 240


class Ranks:
    """``world`` processes joined by gloo; ``run(case)`` returns what ``case.run(world)`` gave on each of them."""

    def __init__(self, world):
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{HERE.parent}:{HERE.parents[1]}"}
        command = [sys.executable, str(HERE / "rank.py"), str(self.folder), str(world)]
        self.processes = []
        for rank in range(world):
            log = (self.folder / f"{rank}.log").open("wb")
            process = subprocess.Popen(
                [*command, str(rank)], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            self.processes.append(process)
        self.asked = 0
        self._wait("ready", START_SECONDS)

    def run(self, case, seconds=CASE_SECONDS):
        self.asked += 1
        name = f"case-{self.asked}"
        (self.folder / f".{name}").write_bytes(pickle.dumps(case))
        (self.folder / f".{name}").rename(self.folder / name)
        self._wait(name, seconds)
        answers = []
        for rank in range(len(self.processes)):
            answers.append(pickle.loads(self._path(name, rank).read_bytes()))
            self._path(name, rank).unlink()
        return answers

    @property
    def alive(self):
        return all(process.poll() is None for process in self.processes)

    def stop(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name, rank):
        return self.folder / f"{name}.{rank}"

    def _wait(self, name, seconds):
        deadline = time.monotonic() + seconds
        while not all(self._path(name, rank).exists() for rank in range(len(self.processes))):
            if not self.alive or time.monotonic() > deadline:
                time.sleep(1)  # let the others say why, too
                logs = [path.read_text() for path in sorted(self.folder.glob("*.log"))]
                self.stop()
                pytest.fail("\n".join([f"{name}: ranks died or did not answer within {seconds} s", *logs]))
            time.sleep(0.01)


@pytest.fixture(scope="session")
def ranks():
    """Return a function of the number of ranks that returns them, started when first asked for or after a failure."""
    started = {}

    def of(world):
        if world not in started or not started[world].alive:
            started[world] = Ranks(world)
        return started[world]

    yield of
    for group in started.values():
        group.stop()
