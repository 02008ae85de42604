"""Jobs that are stopped or killed while they draw or reward: the resumed run is bitwise the undisturbed one."""

import json
import os
import signal

import pytest
from jobs import exit_status
from test_checkpoint_policy import outcome, rows, signalled
from test_rollout import LLAMA, sampled_job

from longstraw.rollout import sampling
from longstraw.tracking.recorder import RunIdentity
from longstraw.training.loop import run_job
from longstraw.training.trainer import Trainer

STEPS = 4  # as ``outcome`` expects
CALLS = []  # of the reward, in this process
KEYS = ("loss", "grad_norm", "reward_mean", "sampled_positions", "sampler_drift", "response_length_mean", "resampled")


def low(completion_ids, **_):
    for act in CALLS:
        act()
    return [sum(token < 64 for token in ids) / len(ids) for ids in completion_ids]


def run(folder, attempt, **changes):
    folder.mkdir(exist_ok=True)
    path = folder.parent / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"prompt {i}", "answer": "ab"}) for i in range(3)))
    drawn = {"data": {"name": "jsonl", "path": str(path)}, "reward": f"{__name__}:low", "model": LLAMA, "stop": [3]}
    sizes = {"context": 40, "response_length": 6, "chunk": 64, "group_size": 3, "steps": STEPS, "save": True}
    return run_job(sampled_job(**drawn | sizes | changes), folder, RunIdentity("x", attempt))


def at_call(number, act):
    """Return a function that acts at its given call."""
    count = 0

    def counted():
        nonlocal count
        count += 1
        if count == number:
            act()

    return counted


def disturb(monkeypatch, where, number, act):
    """Have ``act`` called at the given call of the reward, or at the given position drawn."""
    counted = at_call(number, act)
    if where == "reward":
        monkeypatch.setattr(f"{__name__}.CALLS", [counted])
        return
    draw = sampling.draw_tokens

    def drawing(*arguments):
        counted()
        return draw(*arguments)

    monkeypatch.setattr(sampling, "draw_tokens", drawing)


def killed(folder, where, number, changes):
    """Run the job in a process that is killed there; return its exit status."""
    return exit_status(run_killed, folder, where, number, changes)


def run_killed(folder, where, number, changes):
    with pytest.MonkeyPatch.context() as patch:
        disturb(patch, where, number, signalled(signal.SIGKILL))
        run(folder, 0, **changes)


def run_killed_before_step_3(folder):
    take = Trainer.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Trainer, "step", lambda self, step: os.kill(os.getpid(), signal.SIGKILL) if step == 3 else take(self, step)
        )
        run(folder, 0, **AGAIN | {"checkpoint": {"every": 1}})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    known = {}

    def get(**changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            run(folder, 0, **changes)
            known[key] = outcome(folder, 0), drawn(folder, 0)
        return known[key]

    return get


def drawn(folder, *attempts):
    """Return what each step drew, and check that what an attempt repeats is what is in the records already."""
    found = {}
    for attempt in attempts:
        for row in rows(folder, attempt):
            if row["status"] != "ok":
                continue
            values = [row[key] for key in KEYS]
            assert row["repeated"] == (row["step"] in found)
            assert found.setdefault(row["step"], values) == values
    return found


SEVERAL = {"groups_per_step": 2, "warmup_steps": 1}
AGAIN = {"updates_per_rollout": 2}  # steps 0 and 1 on the same responses, then 2 and 3


@pytest.mark.parametrize(
    ("where", "number", "changes"),
    [("reward", 3, {}), ("sample", 14, {}), ("reward", 4, SEVERAL), ("sample", 20, SEVERAL), ("sample", 9, AGAIN)],
)
def test_a_job_killed_while_it_draws_or_rewards_goes_on_bitwise(tmp_path, undisturbed, where, number, changes):
    folder, saving = tmp_path / "run", {"checkpoint": {"every": 1}}
    assert killed(folder, where, number, changes | saving) == -signal.SIGKILL
    done = [row["step"] for row in rows(folder, 0)]
    assert done == list(range(len(done)))
    assert 0 < len(done) < STEPS
    run(folder, 1, **changes | saving)
    assert (outcome(folder, 0, 1), drawn(folder, 0, 1)) == undisturbed(**changes)
    assert not any(row["repeated"] for row in rows(folder, 1))


def test_without_a_checkpoint_the_same_is_drawn_again_and_marked(tmp_path, undisturbed):
    folder = tmp_path / "run"
    assert killed(folder, "reward", 3, {}) == -signal.SIGKILL
    run(folder, 1)
    assert [row["repeated"] for row in rows(folder, 1)] == [True, True, False, False]
    assert (outcome(folder, 0, 1), drawn(folder, 0, 1)) == undisturbed()


@pytest.mark.parametrize(("where", "number"), [("reward", 2), ("sample", 8)])
def test_a_signal_while_a_job_draws_or_rewards_drops_the_step_and_keeps_a_checkpoint(
    tmp_path, monkeypatch, undisturbed, where, number
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        disturb(patch, where, number, signalled(signal.SIGTERM))
        stopped = run(folder, 0)
    assert "the checkpoint of step 1 is whole" in stopped.reason
    assert [row["status"] for row in rows(folder, 0)] == ["ok", "preempted"]
    run(folder, 1)
    assert (outcome(folder, 0, 1), drawn(folder, 0, 1)) == undisturbed()


def test_a_job_killed_between_updates_on_the_same_responses_repeats_them(tmp_path, undisturbed):
    folder = tmp_path / "run"
    assert exit_status(run_killed_before_step_3, folder) == -signal.SIGKILL
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000002"]
    run(folder, 1, **AGAIN | {"checkpoint": {"every": 1}})
    assert [(row["step"], row["repeated"]) for row in rows(folder, 1)] == [(2, True), (3, False)]
    assert (outcome(folder, 0, 1), drawn(folder, 0, 1)) == undisturbed(**AGAIN)
