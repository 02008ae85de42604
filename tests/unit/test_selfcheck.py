"""The self-check of operations on a device: it passes where they are right, names what is not, and stops a job."""

import json

import pytest
import torch
from test_loop import job

from longstraw import selfcheck
from longstraw.config import ConfigError, load_model_config
from longstraw.layers.op_cases import Draw
from longstraw.ops import choose_ops
from longstraw.selfcheck import SelfCheckError, check_job, check_ops, main, require
from longstraw.tracking.recorder import RunIdentity
from longstraw.training import loop as train

CPU = torch.device("cpu")
SIZES = {"positions": 9, "rows": 40}
QWEN, GLM, LLAMA = "qwen3_6_tiny", "glm_5_2_tiny", "llama_tiny"


def findings(model, *, dtype=None, seed=0):
    config = load_model_config(model)
    draw = Draw(CPU, dtype or getattr(torch, config.dtype), seed)
    return check_ops(config, draw, backend="cpu", **SIZES)


@pytest.mark.parametrize(
    ("model", "ops"),
    [
        (QWEN, {"attention", "gated delta rule", "causal convolution", "log-probabilities"}),
        (GLM, {"attention to chosen rows", "choice of rows", "log-probabilities"}),
        (LLAMA, {"attention", "log-probabilities"}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_right_operations_pass(model, ops, dtype):
    found = findings(model, dtype=dtype)
    assert {x.op for x in found} == ops
    assert all(x.passed for x in found)
    require(found, CPU)


def test_a_rank_checks_the_heads_that_it_has():
    """Qwen's tiny model has 2 key heads and 4 value heads of its delta rule: each of two ranks has half of them."""
    seen = {}

    def noting(backend):
        ops = choose_ops(backend)

        def delta(q, k, v, *rest):
            seen["delta"] = q.shape[1], v.shape[1]
            return ops.delta(q, k, v, *rest)

        def conv(x, *rest):
            seen["conv"] = x.shape[1]
            return ops.conv(x, *rest)

        return ops._replace(delta=delta, conv=conv)

    config = load_model_config(QWEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selfcheck, "choose_ops", noting)
        check_ops(config, Draw(CPU, torch.float32, 0), backend="cpu", **SIZES)
        whole = dict(seen)
        check_ops(config, Draw(CPU, torch.float32, 0), backend="cpu", cp=2, **SIZES)
    assert whole["delta"] == (config.linear_num_key_heads, config.linear_num_value_heads)
    assert seen["delta"] == tuple(n // 2 for n in whole["delta"])
    assert seen["conv"] == whole["conv"] // 2


def test_ranks_that_cannot_divide_the_heads_are_refused():
    with pytest.raises(ConfigError, match="3 ranks cannot share a prompt"):
        check_ops(load_model_config(QWEN), Draw(CPU, torch.float32, 0), backend="cpu", cp=3, **SIZES)


def wrong(op, change):
    """Let the backend under test have another implementation of one operation."""

    def choose(backend):
        ops = choose_ops(backend)
        return ops if backend == "reference" else ops._replace(**{op: change(getattr(ops, op))})

    return choose


@pytest.mark.parametrize(
    ("op", "change", "tensor"),
    [
        ("delta", lambda real: lambda *x: real(*x[:3], 2 * x[3], *x[4:]), "gated delta rule: output"),
        ("conv", lambda real: lambda *x: real(*x[:2], torch.zeros_like(x[2])), "causal convolution: gradient of tail"),
        ("logits", lambda real: lambda *x: tuple(y * float("nan") for y in real(*x)), "logit is off by nan"),
    ],
)
def test_a_wrong_operation_is_named(op, change, tensor, monkeypatch):
    monkeypatch.setattr(selfcheck, "choose_ops", wrong(op, change))
    found = findings(QWEN)
    assert not found[0].passed
    with pytest.raises(SelfCheckError, match=tensor):
        require(found, CPU)


def test_command(capsys, monkeypatch):
    arguments = ["model=qwen3_6_tiny", "backend=cpu", "device=cpu", "positions=9", "rows=40"]
    assert main(arguments) == 0
    assert "selfcheck: passed" in capsys.readouterr().out
    monkeypatch.setattr(selfcheck, "choose_ops", wrong("conv", lambda real: lambda *x: real(-x[0], *x[1:])))
    assert main(arguments) == 1
    assert "FAILED: causal convolution" in capsys.readouterr().out


def test_help_names_the_keys_without_a_gpu(capsys):
    assert main(["--help"]) == 0
    assert "positions=512" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("backend=gpu", "reference, cpu, cuda"),
        ("row=3", "rows"),
        ("rows", "no key=value"),
        ("positions=0", "positions"),
    ],
)
def test_arguments_that_mean_nothing(argument, words, capsys):
    assert main(["device=cpu", argument]) == 2
    assert words in capsys.readouterr().err


def test_only_a_cuda_job_is_checked_and_may_leave_it_out():
    assert check_job(job()) == (None, None)
    assert check_job(job(hardware={"name": "cuda", "backend": "cuda"}, selfcheck="off")) == ("off", None)
    with pytest.raises(ValueError, match="auto, off"):
        job(selfcheck="on")


def test_a_job_that_fails_it_stops_before_training_and_its_record_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "check_job", lambda _: ("failed", SelfCheckError("attention: output is off by 0.3")))
    with pytest.raises(SelfCheckError):
        train.run_job(job(), tmp_path, RunIdentity("x"))
    (row,) = map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())
    assert (row["status"], row["selfcheck"]) == ("error", "failed")
    assert "output is off by 0.3" in row["error"]
