"""The jobs of a folder, each on as many ranks as it has, forked on this machine without SLURM: what to compare with.

``python one_machine.py FOLDER`` runs every ``FOLDER/*/spec.json``, one after the other, and exits with 0 if all ended
well.
"""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

SECONDS = 240  # for all of them


def start(run_dir):
    """Fork the ranks of a job; return their process ids."""
    from longstraw.config import from_dict
    from longstraw.launch.worker import execute

    world = from_dict(json.loads((run_dir / "spec.json").read_text())["config"]).hardware.world_size
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        code = 1
        try:
            os.environ["SUBMITIT_EXECUTOR"] = "local"
            for key, value in (("NTASKS", world), ("GLOBALID", rank), ("LOCALID", rank), ("JOB_ID", os.getppid())):
                os.environ[f"SUBMITIT_LOCAL_{key}"] = str(value)
            execute(run_dir)
            code = 0
        finally:
            os._exit(code)
    return pids


def wait(pids, deadline):
    """Return whether all ranks ended well; end those that are late."""
    codes = {}
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return set(codes.values()) == {0}


def main(folder):
    for name in ("longstraw.training.loop", "longstraw.runtime.rendezvous", "torch._dynamo"):
        importlib.import_module(name)  # once for all ranks, also what torch would load at its first step
    deadline, ended = time.monotonic() + SECONDS, []
    for path in sorted(folder.glob("*/spec.json")):
        ended.append(wait(start(path.parent), deadline))
    return all(ended)


if __name__ == "__main__":
    sys.exit(0 if main(Path(sys.argv[1])) else 1)
