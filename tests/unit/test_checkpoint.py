"""Checkpoints of one rank: whole or not at all, and bitwise."""

import json
import logging
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from longstraw.errors import RankLostError
from longstraw.runtime.preemption import Preempted, Stop
from longstraw.training import checkpoint
from longstraw.training.checkpoint import CheckpointMismatchError, Checkpoints, Owner, any_rank, read_state


def training(seed=0, *, width=3, fused=True, dtype=torch.float32):
    """Return parameters by name, one of them 0-d, and their optimizer."""
    torch.manual_seed(seed)
    shapes = {"model.a.weight": (4, width), "model.b.bias": (width,), "scale": ()}
    parameters = {name: torch.nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}
    return parameters, torch.optim.AdamW(parameters.values(), lr=0.1, fused=fused)


def take_step(parameters, optimizer):
    """Take a step that depends on every parameter and on the random state."""
    optimizer.zero_grad()
    sum(((p * torch.randn(p.shape).to(p.dtype)).sin() ** 2).sum() for p in parameters.values()).backward()
    optimizer.step()


def everything(parameters, optimizer):
    state = {n: {k: v.clone() for k, v in optimizer.state[p].items()} for n, p in parameters.items()}
    return {n: p.detach().clone() for n, p in parameters.items()}, state, torch.get_rng_state()


def differ(one, other):
    """Return what of two trainings is not bitwise the same."""
    found = [n for n in one[0] if not torch.equal(one[0][n], other[0][n])]
    found += [f"{n}.{k}" for n in one[1] for k in one[1][n] if not torch.equal(one[1][n][k], other[1][n][k])]
    return found + ["random"] * (not torch.equal(one[2], other[2]))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_resumed_training_is_bitwise_the_undisturbed_one(tmp_path, dtype, fused):
    parameters, optimizer = training(dtype=dtype, fused=fused)
    for _ in range(3):
        take_step(parameters, optimizer)
    assert Checkpoints(tmp_path, parameters, optimizer).save(3)
    for _ in range(2):
        take_step(parameters, optimizer)
    undisturbed = everything(parameters, optimizer)

    parameters, optimizer = training(seed=1, dtype=dtype, fused=fused)  # other weights, no state of the optimizer
    assert Checkpoints(tmp_path, parameters, optimizer).load() == 3
    take_step(parameters, optimizer)
    early = everything(parameters, optimizer)
    take_step(parameters, optimizer)
    assert differ(undisturbed, everything(parameters, optimizer)) == []
    assert {"model.a.weight", "model.a.weight.exp_avg", "model.b.bias.step", "random"} <= set(
        differ(undisturbed, early)
    )
    kept = optimizer.state[parameters["scale"]]["step"]
    assert (kept.dtype, kept.shape) == (torch.float32, ())


def test_without_an_optimizer_and_before_its_first_step(tmp_path):
    parameters, optimizer = training()
    Checkpoints(tmp_path / "none", parameters, None).save(1)
    Checkpoints(tmp_path / "early", parameters, optimizer).save(0)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    others, other = training(seed=1)
    take_step(others, other)
    assert Checkpoints(tmp_path / "early", others, other).load() == 0
    assert not other.state  # as it was when it was written, not as it has become
    assert all(torch.equal(before[name], others[name]) for name in before)
    others, _ = training(seed=1)
    assert Checkpoints(tmp_path / "none", others, None).load() == 1
    assert all(torch.equal(before[name], others[name]) for name in before)


def test_copies_in_host_memory_are_updated_in_the_parameters_stead(tmp_path):
    parameters, _ = training()
    copies = {name: torch.nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    optimizer = torch.optim.AdamW(copies.values(), lr=0.1)
    take_step(copies, optimizer)
    for name, p in parameters.items():
        p.data.copy_(copies[name].data)
    Checkpoints(tmp_path, parameters, optimizer, updated=copies).save(1)
    take_step(copies, optimizer)
    wanted = everything(copies, optimizer)
    others, _ = training(seed=1)
    copies = {name: torch.nn.Parameter(p.detach().clone()) for name, p in others.items()}
    optimizer = torch.optim.AdamW(copies.values(), lr=0.1)
    assert Checkpoints(tmp_path, others, optimizer, updated=copies).load() == 1
    assert all(torch.equal(others[name], copies[name]) for name in others)
    take_step(copies, optimizer)
    assert differ(wanted, everything(copies, optimizer)) == []
    with pytest.raises(ValueError, match="without a name"):
        Checkpoints(tmp_path, others, optimizer)


def test_nothing_to_load(tmp_path):
    assert Checkpoints(tmp_path / "never", *training()).load() is None


def test_only_the_last_are_kept(tmp_path):
    parameters, optimizer = training()
    checkpoints = Checkpoints(tmp_path, parameters, optimizer, owner=Owner(keep_last=2))
    (tmp_path / ".step-00000001.attempt-0").mkdir()  # a save that was killed
    (tmp_path / "step-00000099").mkdir()  # broken: not to be counted among those kept
    for step in (1, 2, 9, 10):
        checkpoints.save(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000009", "step-00000010", "step-00000099"]
    assert checkpoints.newest == 10


def test_the_same_step_again_takes_the_place_of_the_first(tmp_path):
    parameters, optimizer = training()
    Checkpoints(tmp_path, parameters, optimizer).save(1)
    with torch.no_grad():
        parameters["scale"].fill_(7)
    Checkpoints(tmp_path, parameters, optimizer, owner=Owner(attempt=1)).save(1)
    others, other = training(seed=1)
    assert Checkpoints(tmp_path, others, other).load() == 1
    assert others["scale"].item() == 7
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert read_state(tmp_path / "step-00000001")["attempt"] == 1


def cut(place):
    os.truncate(place / "__0_0.distcp", (place / "__0_0.distcp").stat().st_size - 1)


def flip(place):
    content = bytearray((place / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (place / "__0_0.distcp").write_bytes(content)


def tear(place):
    text = (place / "state.json").read_text()
    (place / "state.json").write_text(text[: len(text) // 2])


BREAKS = {
    "is missing": lambda place: (place / "__0_0.distcp").unlink(),
    ".metadata is missing": lambda place: (place / ".metadata").unlink(),
    "has other content": flip,
    " bytes": cut,
    "state.json is missing or torn": tear,
}


@pytest.mark.parametrize("reason", BREAKS)
def test_a_broken_one_is_passed_over_with_a_warning(tmp_path, caplog, reason):
    parameters, optimizer = training()
    checkpoints = Checkpoints(tmp_path, parameters, optimizer)
    take_step(parameters, optimizer)
    checkpoints.save(1)
    wanted = everything(parameters, optimizer)
    take_step(parameters, optimizer)
    checkpoints.save(2)
    BREAKS[reason](tmp_path / "step-00000002")
    others, other = training(seed=1)
    with caplog.at_level(logging.WARNING):
        assert Checkpoints(tmp_path, others, other).load() == 1
    assert differ(wanted, everything(others, other)) == []
    assert "step-00000002 is broken and skipped" in caplog.text
    assert reason in caplog.text
    BREAKS[reason](tmp_path / "step-00000001")
    others, other = training(seed=1)
    before = everything(others, other)[0]
    assert Checkpoints(tmp_path, others, other).load() is None
    assert all(torch.equal(before[name], others[name]) for name in before)  # nothing of it was taken


def test_another_model_is_refused_by_name(tmp_path):
    parameters, optimizer = training()
    Checkpoints(tmp_path, parameters, optimizer).save(1)
    with pytest.raises(CheckpointMismatchError, match=r"has in another shape model\.a\.weight, model\.b\.bias"):
        Checkpoints(tmp_path, *training(width=5)).load()
    more = {**parameters, "extra": torch.nn.Parameter(torch.zeros(1))}
    with pytest.raises(CheckpointMismatchError, match="lacks extra"):
        Checkpoints(tmp_path, more, optimizer).load()
    del more["extra"], more["scale"]
    with pytest.raises(CheckpointMismatchError, match="has besides scale"):
        Checkpoints(tmp_path, more, None).load()


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"optimizer": {"lr": 0.5}}, r"optimizer\.lr \(0\.1 there, 0\.5 here\)"),
        ({"seed": 1}, r"seed \(0 there, 1 here\)"),
        ({"data": {"path": "b"}}, r"data\.path \(a there, b here\)"),
        ({"new": True}, r"new \(None there, True here\)"),
        ({"steps": 2}, r"steps \(3 taken there, 2 here\)"),
        ({"steps": 9, "hardware": {"ranks": 2}, "tracking": {"mode": "disabled"}, "chunk": 64}, None),
    ],
)
def test_a_checkpoint_of_another_configuration_is_refused_by_key(tmp_path, changes, differs):
    wrote = {"optimizer": {"lr": 0.1}, "seed": 0, "data": {"path": "a"}, "steps": 4, "hardware": {}, "chunk": 128}
    Checkpoints(tmp_path, *training(), owner=Owner(wrote)).save(3)
    parameters, optimizer = training(seed=1)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    checkpoints = Checkpoints(tmp_path, parameters, optimizer, owner=Owner({**wrote, **changes}))
    if differs is None:
        assert checkpoints.load() == 3
        return
    with pytest.raises(CheckpointMismatchError, match=f"of a run with another configuration: {differs};"):
        checkpoints.load()
    assert all(torch.equal(before[name], parameters[name]) for name in before)


def test_a_zombie_leaves_everything_as_it_was(tmp_path):
    parameters, optimizer = training()
    Checkpoints(tmp_path, parameters, optimizer, owner=Owner(attempt=1)).save(4)
    content = (tmp_path / "step-00000004" / "state.json").read_text()
    zombie = Checkpoints(tmp_path, parameters, optimizer, owner=Owner(keep_last=1), superseded=lambda: True)
    for step in (4, 5):
        assert not zombie.save(step)
    assert zombie.newest is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    assert (tmp_path / "step-00000004" / "state.json").read_text() == content


def test_what_torch_s_own_writer_meets_is_raised_as_it_is(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(OSError, match="No space left on device"):
        Checkpoints(tmp_path, *training()).save(3)
    assert not (tmp_path / "step-00000003").exists()


def test_another_rank_s_failure_names_it():
    failure = CheckpointException("", {1: (MemoryError("no memory"), [])})
    with pytest.raises(RankLostError, match="rank 1 on its host failed: no memory") as raised, checkpoint._plain():
        raise failure
    assert raised.value.status == "oom"


def test_a_full_disk_leaves_the_older_one(tmp_path, monkeypatch):
    parameters, optimizer = training()
    checkpoints = Checkpoints(tmp_path, parameters, optimizer)
    checkpoints.save(1)
    monkeypatch.setattr(
        "longstraw.training.checkpoint.os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(2)
    monkeypatch.undo()
    assert Checkpoints(tmp_path, *training(seed=1)).load() == 1


def killed_while_saving(checkpoints, moment):
    """Fork; save step 2 in the child, which dies at its first call of ``moment``; return its exit status."""
    child = os.fork()
    if child == 0:
        threading.Timer(60, os._exit, [3]).start()
        owner, name = moment
        setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        try:
            checkpoints.save(2)
        finally:
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("moment", [(checkpoint.dcp, "save"), (checkpoint.json, "dump"), (Path, "rename")])
def test_a_kill_while_writing_leaves_the_older_one(tmp_path, moment):
    parameters = {"a": torch.nn.Parameter(torch.full((200,), 5.0))}
    Checkpoints(tmp_path, parameters, None).save(1)
    with torch.no_grad():
        parameters["a"].fill_(6)
    assert killed_while_saving(Checkpoints(tmp_path, parameters, None), moment) == -signal.SIGKILL
    checkpoints = Checkpoints(tmp_path, parameters, None)
    assert checkpoints.load() == 1
    assert bool((parameters["a"] == 5).all())
    assert checkpoints.save(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_state_is_plain_json(tmp_path):
    Checkpoints(tmp_path, *training(), owner=Owner(attempt=3)).save(7)
    state = json.loads((tmp_path / "step-00000007" / "state.json").read_text())
    assert (state["step"], state["attempt"], state["ranks"]) == (7, 3, 1)
    assert set(state["files"]) == {".metadata", "__0_0.distcp"}
    shutil.rmtree(tmp_path / "step-00000007")
    assert read_state(tmp_path / "step-00000007") == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_only_sets_a_flag_that_is_read_later(number):
    before = signal.getsignal(number)
    with Stop(any_rank).listening() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        assert stop.asked == number
        with pytest.raises(Preempted, match=number.name):
            stop.check()
    assert signal.getsignal(number) == before


def test_what_was_heard_before_the_loop_listens_counts_there():
    with Stop().listening() as outer:
        with Stop().listening() as inner:
            inner.check()  # nothing yet
        os.kill(os.getpid(), signal.SIGTERM)
        assert outer.asked == signal.SIGTERM
        with Stop().listening() as inner, pytest.raises(Preempted, match="SIGTERM"):
            inner.check()
    with Stop().listening() as later:
        later.check()


def test_all_ranks_stop_if_one_was_asked():
    stop = Stop(lambda flag: True)
    with pytest.raises(Preempted, match="another rank"):
        stop.check()


def test_a_thread_cannot_listen_and_does_not_fail():
    heard = []

    def work():
        with Stop().listening() as stop:
            heard.append(stop.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert heard == [None]
