"""Jobs that are stopped or killed and go on: losses and parameters are bitwise those of an undisturbed run."""

import json
import os
import signal

import pytest
from jobs import cpu_job, exit_status

from longstraw.runtime.preemption import Stop, Superseded
from longstraw.tracking.recorder import RunIdentity, records_path
from longstraw.tracking.schema import numbers
from longstraw.training import checkpoint_policy as resume
from longstraw.training import loop as train
from longstraw.training import trainer
from longstraw.training.checkpoint_policy import last_step
from longstraw.training.loop import run_job
from longstraw.training.monitor import Monitor

STEPS = 4
SMALL = {"num_hidden_layers": 2, "full_attention_interval": 2, "hidden_size": 32, "intermediate_size": 48}


def job(**changes):
    loss = {"old_logprobs": "score", "kl_coef": 0.1}  # not 0 on policy
    return cpu_job(SMALL, **{"context": 280, "chunk": 64, "algorithm": loss, "steps": STEPS, "save": True} | changes)


def run(folder, attempt, **changes):
    return run_job(job(**changes), folder, RunIdentity("x", attempt))


def rows(folder, attempt):
    return [numbers(json.loads(line)) for line in records_path(folder, attempt).read_text().splitlines()]


def outcome(folder, *attempts):
    """Return loss and gradient norm of every step, the last attempt's where there are two, and the saved tensors."""
    last = {}
    for attempt in attempts:
        last |= {row["step"]: (row["loss"], row["grad_norm"]) for row in rows(folder, attempt) if row["status"] == "ok"}
    saved = {path.name: path.read_bytes() for path in sorted(folder.glob("*/*.safetensors"))}
    assert sorted(last) == list(range(STEPS))
    assert saved
    return last, saved


def at_advance(monkeypatch, number, act):
    """Have ``act`` called at the given chunk or branch of the job."""
    count, advance = 0, Monitor.advance

    def counted(self, positions):
        nonlocal count
        count += 1
        if count == number:
            act()
        advance(self, positions)

    monkeypatch.setattr(Monitor, "advance", counted)


def signalled(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function that gives what an undisturbed job of these changes comes to."""
    known = {}

    def get(**changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            assert run(folder, 0, **changes) is None
            assert not (folder / "checkpoints").exists()  # ten minutes have not passed
            known[key] = outcome(folder, 0)
        return known[key]

    return get


LORA = {"adapter": {"name": "lora", "rank": 2, "alpha": 4, "targets": ["q_proj"]}, "prompt_grad": "exact"}


@pytest.mark.parametrize(("changes", "where"), [({}, 1), ({}, 30), ({}, 55), (LORA, 33)])
def test_a_job_that_is_asked_to_end_goes_on_where_it_stood(tmp_path, monkeypatch, undisturbed, changes, where):
    at_advance(monkeypatch, where, signalled(signal.SIGUSR2 if where % 2 else signal.SIGTERM))
    stopped = run(tmp_path, 0, **changes)
    monkeypatch.undo()
    first = rows(tmp_path, 0)
    step = first[-1]["step"]
    assert (first[-1]["status"], [row["step"] for row in first[:-1]]) == ("preempted", list(range(step)))
    assert first[-1]["error"] == stopped.reason
    assert f"the checkpoint of step {step} is whole" in stopped.reason
    assert "again" not in stopped.reason
    assert stopped.progressed == (step > 0)
    assert not (tmp_path / "model").exists()
    assert run(tmp_path, 1, **changes) is None
    assert outcome(tmp_path, 0, 1) == undisturbed(**changes)
    second = rows(tmp_path, 1)
    assert [(row["step"], row["resumed_step"], row["repeated"]) for row in second] == [
        (number, step, False) for number in range(step, STEPS)
    ]
    assert {row["attempt"] for row in second} == {1}


def test_a_signal_that_came_while_the_job_was_loaded_ends_it_before_it_begins(tmp_path, monkeypatch, undisturbed):
    at_advance(monkeypatch, 30, signalled(signal.SIGUSR2))
    run(tmp_path, 0)
    monkeypatch.undo()
    done = rows(tmp_path, 0)[-1]["step"]
    with Stop().listening(), monkeypatch.context() as patch:
        os.kill(os.getpid(), signal.SIGTERM)
        patch.setattr(train, "build_trainer", lambda *_: pytest.fail("it was loaded all the same"))
        stopped = run(tmp_path, 1)
    assert (stopped.signal, stopped.progressed) == (signal.SIGTERM, False)
    (row,) = rows(tmp_path, 1)
    assert (row["status"], row["step"], row["error"]) == ("preempted", done, stopped.reason)
    run(tmp_path, 2)
    assert outcome(tmp_path, 0, 1, 2) == undisturbed()
    assert [row["repeated"] for row in rows(tmp_path, 2)] == [False] * (STEPS - done)


def test_ctrl_c_stops_at_a_safe_place_and_twice_at_once(tmp_path, monkeypatch, undisturbed):
    at_advance(monkeypatch, 30, signalled(signal.SIGINT))
    stopped = run(tmp_path / "once", 0)
    monkeypatch.undo()
    last = rows(tmp_path / "once", 0)[-1]
    assert (last["status"], last["error"]) == ("preempted", stopped.reason)
    assert stopped.reason == f"interrupted (SIGINT); the checkpoint of step {last['step']} is whole"
    run(tmp_path / "once", 1)
    assert outcome(tmp_path / "once", 0, 1) == undisturbed()

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_advance(monkeypatch, 30, twice)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "twice", 0)
    assert not (tmp_path / "twice" / "checkpoints").exists()


def test_between_two_refreshes_the_work_since_the_last_is_done_again(tmp_path, monkeypatch, undisturbed):
    changes = {"refresh_every": 2, "checkpoint": {"every": 1}}
    begun, step = [], trainer.Trainer.step

    def counted(self, number):
        begun.append(number)
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, number)

    monkeypatch.setattr(trainer.Trainer, "step", counted)
    stopped = run(tmp_path, 0, **changes)
    monkeypatch.undo()
    assert begun == [0, 1, 2, 3]
    assert "the checkpoint of step 2 is whole, 1 steps will be repeated" in stopped.reason
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002"]
    run(tmp_path, 1, **changes)
    assert outcome(tmp_path, 0, 1) == undisturbed(refresh_every=2)
    assert [(row["step"], row["repeated"]) for row in rows(tmp_path, 1)] == [(2, True), (3, False)]
    assert [row["state_age"] for row in rows(tmp_path, 1)] == [0, 1]


def killed(folder, at, changes):
    """Run the job in a process that is killed at a chunk or branch; return its exit status."""
    return exit_status(run_killed, folder, at, changes)


def run_killed(folder, at, changes):
    with pytest.MonkeyPatch.context() as patch:
        at_advance(patch, at, signalled(signal.SIGKILL))
        run(folder, 0, **changes)


@pytest.mark.parametrize("at", [2, 30])
def test_a_killed_job_goes_on_from_its_last_checkpoint(tmp_path, undisturbed, at):
    assert killed(tmp_path, at, {"checkpoint": {"every": 1}}) == -signal.SIGKILL
    done = [row["step"] for row in rows(tmp_path, 0)]
    assert run(tmp_path, 1, checkpoint={"every": 1}) is None
    assert outcome(tmp_path, 0, 1) == undisturbed()
    again = rows(tmp_path, 1)
    assert again[0]["step"] == len(done)
    assert again[0]["resumed_step"] == (len(done) or None)
    assert not any(row["repeated"] for row in again)


def test_without_a_checkpoint_everything_is_done_again_and_marked(tmp_path, undisturbed):
    assert killed(tmp_path, 55, {}) == -signal.SIGKILL
    done = [row["step"] for row in rows(tmp_path, 0)]
    assert done
    run(tmp_path, 1)
    assert [row["repeated"] for row in rows(tmp_path, 1)] == [step in done for step in range(STEPS)]
    assert outcome(tmp_path, 0, 1) == undisturbed()


def run_dying_when_saved(folder, moment):
    def dies(trainer, folder):
        save(trainer, folder)
        if moment == "while it saves":
            (folder / "model").rename(folder / ".model.x")
        os._exit(5)

    save = train.save_trained
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "save_trained", dies)
        run(folder, 0, checkpoint={"every": 1})


@pytest.mark.parametrize("moment", ["while it saves", "after it saved"])
def test_a_job_that_was_killed_when_all_steps_were_done_saves_again(tmp_path, undisturbed, moment):
    assert exit_status(run_dying_when_saved, tmp_path, moment) == 5
    assert run(tmp_path, 1, checkpoint={"every": 1}) is None
    assert outcome(tmp_path, 0, 1) == undisturbed()
    assert sorted(path.name for path in tmp_path.iterdir() if "model" in path.name) == ["model"]


def test_a_zombie_writes_nothing_once_a_later_attempt_has_begun(tmp_path, monkeypatch):
    at_advance(monkeypatch, 30, lambda: records_path(tmp_path, 1).touch())
    with pytest.raises(Superseded):
        run(tmp_path, 0, checkpoint={"every": 1})
    monkeypatch.undo()
    done = rows(tmp_path, 0)
    assert done
    assert {row["status"] for row in done} == {"ok"}
    newest = max(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert newest == f"step-{len(done):08d}"


def test_checkpoints_follow_the_clock_or_the_count(tmp_path, monkeypatch):
    saved = []

    def save(self, step):
        saved.append(step)
        self.newest = step
        return True

    monkeypatch.setattr(resume.Checkpoints, "save", save)
    run(tmp_path / "count", 0, checkpoint={"every": 2}, save=False)
    assert saved == [2]  # not at the end, where nothing is left to do
    saved.clear()
    run(tmp_path / "clock", 0, checkpoint={"minutes": 0}, save=False)
    assert saved == [1, 2, 3]


def test_the_last_step_recorded_before(tmp_path):
    records_path(tmp_path, 0).write_text('{"step": 0, "status": "ok"}\n{"step": 1, "status": "preempted"}\n{"st')
    assert (last_step(tmp_path, 0), last_step(tmp_path, 1), last_step(tmp_path, 3)) == (-1, 0, 0)
