"""How ranks come to be and how they end: real processes on loopback that are killed, stopped and made to fail.

The ranks of all cases are forked from one process that has torch loaded, at once, so that the jobs also share a
machine; this file is that process too (``main``). What must hold of each is then looked up in its folder.
"""

import contextlib
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 40  # hardware.timeout_s of the cases
VERBS = ("prefill", "replay", "prompt_backward")
CASES = {  # name: ranks, the one that falls, how, in which verb, time-out
    **{f"{how} in {verb}": (2, 1, how, verb, TIMEOUT_S) for how in ("stopped", "raises") for verb in VERBS},
    **{f"training, killed in {verb}": (2, 1, "killed", verb, TIMEOUT_S) for verb in VERBS},
    "training, stopped in replay": (2, 1, "stopped", "replay", TIMEOUT_S),
    "training, raises in prompt_backward": (2, 1, "raises", "prompt_backward", TIMEOUT_S),
    "out of memory": (3, 2, "out of memory", "replay", TIMEOUT_S),
    "rank 0 killed": (3, 0, "killed", "replay", TIMEOUT_S),
    "rank 0 stopped": (3, 0, "stopped", "replay", TIMEOUT_S),
    "rank 0 raises": (3, 0, "raises", "replay", TIMEOUT_S),
    "rank 1 absent": (3, 1, "absent", "", 12),
    "rank 0 absent": (2, 0, "absent", "", 12),
    "training, asked to end": (2, 1, "asked", "replay", TIMEOUT_S),
    "fine": (3, 0, "", "", TIMEOUT_S),
    "fine too": (2, 0, "", "", TIMEOUT_S),
    "nobody asks for the cause": (2, 1, "killed", "replay", TIMEOUT_S),
}
SAID = {
    "killed": "stopped answering at",
    "stopped": "stopped answering at",
    "raises": "failed: the data of this rank",
    "out of memory": "failed: no memory",
    "absent": "never came",
}


def environment():
    """Return this process's environment without what may tell its children that they are ranks."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SUBMITIT_"))}
    return {**mine, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run all cases; return their folders and each rank's exit status, None for one that did not end in time."""
    folder = tmp_path_factory.mktemp("ranks")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, __file__, str(folder)], env=environment(), stdout=log, stderr=log)
        try:
            code = process.wait(400)
        finally:
            process.terminate()
            process.wait(30)
    assert code == 0, (folder / "log").read_text()[-5000:]
    return folder, json.loads((folder / "codes.json").read_text())


def rows(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


FALLS = [name for name, case in CASES.items() if case[2] in SAID][:-1]


@pytest.mark.parametrize("name", FALLS)
def test_a_rank_that_falls_ends_the_job_and_is_named(ended, name):
    folder, codes = ended
    world, fallen, how, _, _ = CASES[name]
    survivors = [rank for rank in range(world) if rank != fallen]
    assert all(codes[name][rank] == 1 for rank in survivors), codes[name]
    last = rows(folder / name)[-1]
    assert last["failed_rank"] == fallen
    assert last["status"] == ("oom" if how == "out of memory" else "error")
    said = SAID[how] if fallen or how != "raises" else "the data of this rank"
    assert said in last["error"]
    assert fallen == 0 or last["error"].startswith(f"rank {fallen} on ")
    result = json.loads((folder / name / "result.json").read_text())
    assert (result["status"], result["error"]) == (last["status"], last["error"])
    assert sum(row["status"] != "ok" for row in rows(folder / name)) == 1


@pytest.mark.parametrize("name", FALLS)
def test_every_rank_that_could_leaves_its_reason(ended, name):
    folder, _ = ended
    world, fallen, how, _, _ = CASES[name]
    words = {path.stem: json.loads(path.read_text()) for path in (folder / name / "ranks" / "0").glob("[0-9]*.json")}
    silent = how in ("killed", "stopped", "absent")
    assert set(words) == {str(rank) for rank in range(world) if not silent or rank != fallen}
    assert {word["rank"] for word in words.values()} == {fallen}


def test_a_rank_that_is_asked_to_end_takes_the_others_with_it(ended):
    folder, codes = ended
    name = "training, asked to end"
    assert codes[name] == [0, 0]
    assert [row["status"] for row in rows(folder / name)] == ["preempted"]
    assert not list((folder / name).glob("ranks/0/[0-9]*.json"))


def test_jobs_on_one_machine_do_not_meet(ended):
    folder, codes = ended
    for name in ("fine", "fine too"):
        world = CASES[name][0]
        assert codes[name] == [0] * world
        (row,) = rows(folder / name)
        assert (row["status"], row["loss"]) == ("ok", float(world))
        assert not list((folder / name).glob("ranks/0/address*"))
        assert not list((folder / name).glob("ranks/0/[0-9]*.json"))


def test_without_the_question_rank_0_records_what_followed(ended):
    """The control of the tests above: the collective's own error blames nobody."""
    (row,) = rows(ended[0] / "nobody asks for the cause")
    assert row["failed_rank"] == 0
    assert "peer" in row["error"]


def command(folder, *start):
    """Run a tiny job of two ranks as a user would; return its exit status, what it printed, and its job's folders."""
    tiny = ["model=qwen3_6_tiny", "model.num_hidden_layers=4", "context=224", "response_length=24", "chunk=64"]
    words = [sys.executable, "-m", *start, *tiny, "hardware=cpu", "hardware.ranks=2", "hardware.timeout_s=60"]
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too
    return process.returncode, printed, [path.parent for path in folder.glob("runs/*/*/*/spec.json")]


@pytest.mark.parametrize(
    "start", [["longstraw.run"], ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "longstraw.run"]]
)
def test_two_ranks_from_the_command_line_are_one_job(tmp_path, start):
    code, printed, folders = command(tmp_path, *start)
    assert code == 0, printed
    assert len(folders) == 1
    (row,) = rows(folders[0])
    assert (row["status"], row["world_size"], len(row["peak_allocated_bytes_by_rank"])) == ("ok", 2, 2)
    assert json.loads((folders[0] / "result.json").read_text())["status"] == "ok"
    assert printed.count("longstraw: mode=run: 2 ranks ") == 1
    assert printed.count("records: runs/") == 1


def test_torchrun_with_other_ranks_than_the_hardware_s_stops_at_once(tmp_path):
    code, printed, folders = command(
        tmp_path, "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m", "longstraw.run"
    )
    assert code != 0
    assert folders == []
    assert "longstraw: torchrun started 3 ranks and hardware=cpu has 2: give hardware.ranks=3" in printed


# What runs in the other processes.


def training(run_job, config, run_dir, identity, ranks):
    """Run the training loop itself, which loses a rank between two chunks or branches of the case's verb."""
    from longstraw.training.monitor import Progress

    begin, go_on, now = Progress.start, Progress.advance, []

    def start(progress, verb, total):
        now.append(verb)
        begin(progress, verb, total)

    def advance(progress, positions):
        fall(CASES[run_dir.name], now[-1], ranks.rank, run_dir)
        go_on(progress, positions)

    Progress.start, Progress.advance = start, advance
    run_job(config, run_dir, identity, ranks)


def work(config, run_dir, identity, ranks):
    """Stand in for the training loop: collectives in three verbs, of which the case's one loses a rank."""
    import torch
    import torch.distributed as dist

    from longstraw.errors import describe, status_of
    from longstraw.launch.worker import failed_rank
    from longstraw.tracking.recorder import append_row

    row = {"run_id": identity.run_id}
    try:
        for verb in VERBS:
            for chunk in range(3):
                total = torch.ones(())
                dist.all_reduce(total)
                if chunk == 1:
                    fall(CASES[run_dir.name], verb, ranks.rank, run_dir)
        row |= {"status": "ok", "loss": float(total)}
    except Exception as error:
        cause = ranks.cause(error) if run_dir.name != "nobody asks for the cause" else error
        row |= {"status": status_of(cause), "error": describe(cause), "failed_rank": failed_rank(cause)}
        raise cause from error
    finally:
        if ranks.rank == 0:
            append_row(run_dir, row, identity.attempt)


def fall(case, verb, rank, run_dir):
    """Be lost, if it is this rank's turn."""
    import torch

    _, fallen, how, where, _ = case
    if (rank, verb) != (fallen, where):
        return
    (run_dir / "fell").touch()
    if how == "raises":
        raise ValueError("the data of this rank")
    if how == "out of memory":
        raise torch.OutOfMemoryError("no memory")
    signals = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "asked": signal.SIGTERM}
    os.kill(os.getpid(), signals[how])


def start(folder, name, spec):
    """Fork the ranks of a case; return their process ids, 0 for one that never comes."""
    from longstraw.launch import worker as job
    from longstraw.training import loop as train

    world, fallen, how, _, timeout_s = CASES[name]
    run_dir = folder / name
    run_dir.mkdir()
    spec["config"]["hardware"] |= {"ranks": world, "timeout_s": timeout_s}
    (run_dir / "spec.json").write_text(json.dumps(spec))
    pids = []
    for rank in range(world):
        pid = 0 if how == "absent" and rank == fallen else os.fork()
        if pid or (how == "absent" and rank == fallen):
            pids.append(pid)
            continue
        code, run_job = 1, train.run_job
        try:
            train.run_job = functools.partial(training, run_job) if name.startswith("training") else work
            where = {"NTASKS": world, "GLOBALID": rank, "LOCALID": rank, "NODEID": 0, "JOB_ID": os.getppid()}
            os.environ |= {f"SUBMITIT_LOCAL_{key}": str(value) for key, value in where.items()}
            os.environ["SUBMITIT_EXECUTOR"] = "local"
            job.execute(run_dir)
            code = 0
        finally:
            os._exit(code)
    return pids


def wait(folder, pids):
    """Return the exit status of every rank; end those that are not over when their job's time-out is."""
    codes = {name: [None] * len(of) for name, of in pids.items()}
    begun = time.monotonic()
    fell = {}
    waiting = {(name, rank) for name, of in pids.items() for rank, pid in enumerate(of) if pid}
    while waiting:
        for name, rank in sorted(waiting):
            absent = CASES[name][2] == "absent" and (folder / name / "ranks").exists()
            if name not in fell and (absent or (folder / name / "fell").exists()):
                fell[name] = time.monotonic()
            done, status = os.waitpid(pids[name][rank], os.WNOHANG)
            if done:
                codes[name][rank] = os.waitstatus_to_exitcode(status)
                waiting.remove((name, rank))
            # who waits for one that never comes begins to wait after the folder is there
            elif time.monotonic() > min(
                fell.get(name, begun + 240) + CASES[name][4] * (5 if absent else 1), begun + 300
            ):
                os.kill(pids[name][rank], signal.SIGKILL)
                os.waitpid(pids[name][rank], 0)
                waiting.remove((name, rank))
        time.sleep(0.05)
    return codes


def main(folder):
    import longstraw.parallel.materialize
    import longstraw.runtime.rendezvous
    import longstraw.training.loop  # noqa: F401 - loaded once for all ranks
    from longstraw.config import from_dict, load_model_config, to_dict

    hardware = {"name": "cpu", "backend": "cpu"}
    model = {**to_dict(load_model_config("qwen3_6_tiny")), "num_hidden_layers": 4}
    small = {"context": 224, "response_length": 24, "chunk": 64, "prompt_grad": "exact"}
    config = to_dict(from_dict({"model": model, "hardware": hardware, "data": {"name": "needle"}, **small}))
    spec = {"run_id": "r", "sweep": None, "num": 0, "command": "longstraw", "overrides": [], "config": config}
    pids = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    gc.freeze()  # or every fork's collector would copy what it shares with the others
    try:
        for name in CASES:
            pids[name] = start(folder, name, spec)
        codes = wait(folder, pids)
        (folder / "codes.json").write_text(json.dumps(codes))
    finally:
        for pid in (pid for of in pids.values() for pid in of if pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
