"""The real training loop on a real SLURM: ranks over nodes, killed in every way and in every verb, and W&B's files.

One sweep for all of it. Job 0 has two nodes with two ranks each. Job 1 has two ranks on one node: one of them is
killed, then the node, then the step. Job 2 has one rank: it is asked to end, then the step's daemon is killed. Both are
started again until they end, and what they come to is compared with the same jobs on this machine without SLURM. Where
a kill falls is stated, not timed: a rank waits there (``hook/sitecustomize.py``).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from analysis.wandb_files import read_runs
from longstraw import status
from longstraw.config import from_dict, load_model_config, to_dict
from longstraw.launch import jobs as launch
from longstraw.launch import slurm as slurm_module
from longstraw.launch.prepare import prepare
from longstraw.launch.spec import Draft
from longstraw.tracking.run_folder import read_json, read_lines, read_steps
from longstraw.tracking.schema import flatten, numbers, records_path
from longstraw.training.checkpoint import read_state

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SMALL = {"num_hidden_layers": 2, "full_attention_interval": 2, "hidden_size": 32, "intermediate_size": 48}
SETUP = ['echo $PPID > "batch.$SLURM_JOB_ID.$SLURM_RESTART_COUNT"']  # the daemon of the batch script
STEPS = {0: 2, 1: 3, 2: 3}
PLACES = {
    1: {
        0: {"rank": 1, "step": 1, "at": "prefill 1"},
        1: {"rank": 1, "step": 1, "at": "prompt_backward 1"},
        2: {"rank": 0, "step": 1, "at": "checkpoint"},
    },
    2: {
        0: {"rank": 0, "step": 1, "at": "before prefill"},
        1: {"rank": 0, "step": 1, "at": "replay 1"},
    },
}
SECONDS = 300  # that a place may be away


def job(num, **hardware):
    site = {"name": "site", "backend": "cpu", "partition": "h20", "time_min": 15, "timeout_s": 150, "setup": SETUP}
    values = {
        "model": to_dict(load_model_config("qwen3_6_tiny", **SMALL)),
        "hardware": {**site, **hardware},
        "data": {"name": "needle"},
        "tracking": {"mode": "offline", "tags": ["fire"]},
        "algorithm": {"old_logprobs": "score", "kl_coef": 0.1},  # a loss that is not 0 on policy
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": 1},
        "prompt_grad": "exact",
        "context": 152,
        "response_length": 24,
        "chunk": 64,
        "steps": STEPS[num],
        "save": True,
    }
    return from_dict(values)


# How jobs are disturbed.


class Disturber:
    """Wait for the stated places of a sweep's jobs, and kill there. Errors of its threads are kept."""

    def __init__(self, folder, cluster, call, wait_for):
        self.folder, self.cluster, self.call, self.wait_for = folder, cluster, call, wait_for
        self.errors = []

    def place(self, num, attempt):
        """Wait until a job stands where it is to be killed; return who its ranks are."""
        self.wait_for(f"job {num}, attempt {attempt}", (self.folder / f"{num}" / f"at.{attempt}").exists, SECONDS)
        return self.ranks(num, attempt)

    def ranks(self, num, attempt):
        paths = sorted((self.folder / f"{num}").glob(f"seen.{attempt}.*.json"))
        return [json.loads(path.read_text()) for path in paths]

    def mirrored(self, num, attempt):
        """Wait until W&B has what the record has: what was given it a second ago."""
        run_dir = self.folder / f"{num}"
        self.in_wandb(num, lambda: history(run_dir, attempt) == recorded(run_dir, attempt) != [])

    def in_wandb(self, num, holds):
        """Wait until something holds of W&B's files, which cannot be read when they are just being made."""

        def readable():
            with contextlib.suppress(ValueError):
                return holds()
            return False

        self.wait_for(f"W&B of job {num}", readable, 90)

    def kill(self, *pids):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def go_on(self, num, attempt):
        (self.folder / f"{num}" / f"go.{attempt}").touch()

    def kill_node(self, ranks):
        """Kill a node's daemon and all of a job that is on it."""
        me = ranks[0]
        batch = self.folder / f"batch.{me['SLURM_JOB_ID']}."  # of a job that SLURM has not yet restarted
        daemons = {me["parent"], int(batch.read_text())}
        node = int((self.cluster / "run" / f"slurmd.{me['SLURMD_NODENAME']}.pid").read_text())
        self.kill(node, *daemons, *descendants(daemons))

    @contextlib.contextmanager
    def disturbing(self, *functions):
        """Run the functions beside what happens inside."""

        def run(function):
            try:
                function()
            except BaseException as error:
                self.errors.append(error)

        threads = [threading.Thread(target=run, args=(f,), name=f.__name__, daemon=True) for f in functions]
        for thread in threads:
            thread.start()
        yield
        for thread in threads:
            thread.join(60)
        assert self.errors == []
        assert [thread.name for thread in threads if thread.is_alive()] == []  # its place was not reached


def descendants(pids):
    """Return the ids of all processes below ``pids``."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, new = set(), set(pids)
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        found |= new
    return found


def alive(rank):
    """Return whether a rank's process is there, as what it was."""
    with contextlib.suppress(OSError):
        return b"submitit" in Path(f"/proc/{rank['pid']}/cmdline").read_bytes()
    return False


# What records and W&B's files hold.


def recorded(run_dir, attempt):
    """Return what the loop itself recorded in an attempt, as W&B gets it; not what the launcher wrote for it."""
    path = records_path(run_dir, attempt)
    return [flatten(row) for row in read_lines(path) if row["step"] is not None] if path.exists() else []


def fragments(run_dir, attempt):
    return read_runs(run_dir / "wandb" / f"attempt-{attempt}")


def history(run_dir, attempt):
    """Return what W&B's files of an attempt hold, each row once: what may have been lost is given again."""
    rows = []
    for run in fragments(run_dir, attempt):
        rows += [row for row in map(numbers, run.history) if row not in rows]
    return rows


def outcome(run_dir):
    """Return loss and norm of every step, and the saved tensors."""
    rows = read_steps(run_dir)
    assert [(row["step"], row["status"]) for row in rows] == [(step, "ok") for step in range(len(rows))]
    keys = ("loss", "grad_norm", "entropy", "kl")
    return [[row[key] for key in keys] for row in rows], (run_dir / "model" / "model.safetensors").read_bytes()


# The sweep.


def first_round(at, jobs):
    """Kill a rank of job 1; ask job 2 to end, which kills W&B's process too, then kill its daemon, not its rank."""

    def rank():
        ranks = at.place(1, 0)
        at.mirrored(1, 0)
        at.kill(ranks[1]["pid"])

    def ask_then_daemon():
        ranks = at.place(2, 0)
        at.in_wandb(2, lambda: any(run.config for run in fragments(at.folder / "2", 0)))
        at.call("scancel", "--signal=TERM", ranks[0]["SLURM_JOB_ID"])
        at.go_on(2, 0)
        ranks = at.place(2, 1)
        at.kill(ranks[0]["parent"])
        at.call("scontrol", "reconfigure")  # it asks the nodes what they run, which it else does once a minute

    with at.disturbing(rank, ask_then_daemon):
        return launch.launch(jobs, at.folder, alone=False)


def second_round(at, start_node, seen):
    """Let the rank that lives on go on; kill the node of job 1, and the step of the attempt that SLURM then starts."""

    def left():
        ranks = at.ranks(2, 1)
        seen.zombies = [rank for rank in ranks if alive(rank)]
        at.wait_for("job 2 is started again", records_path(at.folder / "2", 2).exists)
        seen.before = files_of(at.folder / "2", 1)
        at.go_on(2, 1)
        at.wait_for("what was left of job 2 ends", lambda: not any(map(alive, ranks)), SECONDS)
        seen.after = files_of(at.folder / "2", 1)

    def node_then_step():
        ranks = at.place(1, 1)
        other = read_json(at.folder / "sweep.json")["jobs"][2]["job_id"]
        at.wait_for("job 2 has ended", (at.folder / "2" / "result.json").exists, SECONDS)
        at.wait_for("job 2 is over", lambda: slurm_module.states()[other].over)
        at.kill_node(ranks)
        try:
            at.place(1, 2)
        finally:
            start_node(ranks[0]["SLURMD_NODENAME"])
        at.mirrored(1, 2)
        at.kill(*(rank["pid"] for rank in at.ranks(1, 2)))

    with at.disturbing(left, node_then_step):
        return status.main([str(at.folder), "--again"])


def files_of(run_dir, attempt):
    """Return what a job holds that an attempt wrote, or would."""
    records = records_path(run_dir, attempt).read_text()
    states = {path.name: read_state(path) for path in (run_dir / "checkpoints").glob("step-*")}
    return records, [name for name, state in states.items() if state.get("attempt") == attempt]


@pytest.fixture(scope="module")
def swept(cluster, point, cancelling, wait_for, start_node, tmp_path_factory):
    """Run the sweep, and its jobs without SLURM; return what is to be looked at."""
    folder, plain = tmp_path_factory.mktemp("swept"), tmp_path_factory.mktemp("plain")
    configs = [job(0, nodes=2, gpus_per_node=2, gpu="h20"), job(1, ranks=2), job(2)]
    with pytest.MonkeyPatch.context() as patch:
        call = point(patch)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE / "hook"), str(ROOT)]))
        patch.setenv("LONGSTRAW_PLACES", str(folder / "places.json"))
        patch.setenv("LONGSTRAW_TOGETHER", str(len(configs)))
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.chdir(folder)
        (folder / "places.json").write_text(json.dumps(PLACES))
        drafts = [Draft(num, [f"num={num}"], folder / str(num), c) for num, c in enumerate(configs)]
        jobs = prepare(drafts, command="longstraw -m", sweep="fire")
        for run in jobs:
            (plain / str(run.num)).mkdir()
            spec = read_json(run.run_dir / "spec.json")
            spec["config"]["tracking"]["mode"] = "disabled"
            (plain / str(run.num) / "spec.json").write_text(json.dumps(spec))
        at = Disturber(folder, cluster, call, wait_for)
        seen, reference = SimpleNamespace(folder=folder, plain=plain, at=at, codes=[]), None
        try:
            with cancelling(540):
                seen.codes.append(first_round(at, jobs))
                reference = without_slurm(plain)
                seen.codes.append(second_round(at, start_node, seen))
                seen.codes.append(status.main([str(folder), "--again"]))
                assert reference.wait(240) == 0, (plain / "log").read_text()[-3000:]
        finally:
            if reference is not None:
                reference.kill()
            at.kill(*(rank["pid"] for path in folder.glob("*/seen.*") if alive(rank := json.loads(path.read_text()))))
    return seen


def without_slurm(folder):
    """Start the jobs of a folder as ranks of this machine; return the process that does."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, str(HERE / "one_machine.py"), str(folder)],
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def test_two_nodes_with_two_ranks_each_are_one_job(swept):
    ranks = swept.at.ranks(0, 0)
    places = [(rank["rank"], rank["SLURMD_NODENAME"], rank["node"], rank["local_rank"]) for rank in ranks]
    assert places == [(0, "node1", 0, 0), (1, "node1", 0, 1), (2, "node2", 1, 0), (3, "node2", 1, 1)]
    assert {rank["world_size"] for rank in ranks} == {4}
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {"0,1"}  # of which each takes that of its local rank
    rows = read_steps(swept.folder / "0")
    assert {(row["world_size"], row["nodes"], row["cp"], row["attempt"]) for row in rows} == {(4, 2, 4, 0)}
    assert [len(row["peak_allocated_bytes_by_rank"]) for row in rows] == [4] * STEPS[0]
    assert not list(swept.folder.glob("0/ranks/0/address*"))


def test_jobs_that_share_a_node_do_not_meet(swept):
    first, second = swept.at.ranks(0, 0), swept.at.ranks(1, 0)
    assert [rank["SLURMD_NODENAME"] for rank in [*first[:2], *second]] == ["node1"] * 4
    assert len({rank["SLURM_JOB_ID"] for rank in first + second}) == 2  # and all had begun before one went on


@pytest.mark.parametrize("num", STEPS)
def test_a_job_comes_bitwise_to_what_it_does_undisturbed_on_one_machine(swept, num):
    rows, saved = outcome(swept.folder / str(num))
    expected, model = outcome(swept.plain / str(num))
    assert rows == expected
    assert saved == model
    assert len({row[1] for row in rows}) == STEPS[num]  # they can differ


def test_every_way_and_every_place_of_being_killed_was_met(swept):
    assert swept.codes == [1, 1, 0]
    for num, places in PLACES.items():
        for attempt in places:
            assert (swept.folder / str(num) / f"at.{attempt}").exists()
        assert len(swept.at.ranks(num, len(places))) == (2 if num == 1 else 1)
    nodes = [swept.at.ranks(1, attempt)[0]["SLURMD_NODENAME"] for attempt in (1, 2)]
    assert sorted(nodes) == ["node1", "node2"]  # SLURM itself started the job again elsewhere


def test_the_records_of_jobs_that_were_killed_have_no_gap(swept):
    rows = [read_steps(swept.folder / str(num), every=True) for num in (1, 2)]
    keys = ("attempt", "step", "status", "failed_rank")
    assert [tuple(row[key] for key in keys) for row in rows[0]] == [
        (0, 0, "ok", None),
        (0, 1, "error", 1),
        (2, 1, "ok", None),
        (2, None, "error", None),
        (3, 1, "ok", None),  # its checkpoint was being written
        (3, 2, "ok", None),
    ]
    assert [tuple(row[key] for key in keys) for row in rows[1]] == [
        (0, 0, "ok", None),
        (0, 1, "preempted", None),
        (1, None, "error", None),
        (2, 1, "ok", None),
        (2, 2, "ok", None),
    ]
    errors = [row["error"] for row in rows[0] + rows[1] if row["status"] == "error"]
    words = ("rank 1 on ", "the process was killed from outside", "SLURM lost sight of its processes")
    assert all(error.startswith(start) for error, start in zip(errors, words, strict=True)), errors
    resumed = [
        [(row["resumed_step"], row["repeated"]) for row in read_steps(swept.folder / str(num))] for num in (1, 2)
    ]
    assert resumed == [[(None, False), (1, True), (1, False)], [(None, False), (1, False), (1, False)]]


def test_a_rank_that_outlives_its_daemon_writes_nothing_once_the_job_is_started_again(swept):
    assert len(swept.zombies) == 1
    assert swept.after == swept.before


@pytest.mark.parametrize("num", STEPS)
def test_wandb_has_configuration_summary_and_history_of_every_attempt(swept, num):
    run_dir = swept.folder / str(num)
    spec = read_json(run_dir / "spec.json")
    attempts = len(PLACES.get(num, {})) + 1
    for attempt in range(attempts):
        runs = fragments(run_dir, attempt)
        assert runs
        for run in runs:
            assert (run.id, run.group, run.tags) == (spec["run_id"], "fire", ["fire"])
            assert run.config == {**spec["config"], "attempt": attempt}
            last = {}
            for row in run.history:
                last |= row
            assert run.summary == last
        assert history(run_dir, attempt) == recorded(run_dir, attempt)
    assert fragments(run_dir, attempts - 1)[-1].exit_code == 0
    steps = {row["step"] for attempt in range(attempts) for row in history(run_dir, attempt) if row["status"] == "ok"}
    assert steps == set(range(STEPS[num]))


def test_wandb_that_slurm_s_signal_killed_was_opened_again(swept):
    first, *later = fragments(swept.folder / "2", 0)
    assert first.exit_code is None
    assert [row["status"] for run in later for row in run.history][-1] == "preempted"
    assert [len(fragments(swept.folder / "0", 0)), len(fragments(swept.folder / "1", 3))] == [1, 1]
