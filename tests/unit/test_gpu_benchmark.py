"""The GPU benchmark's own arithmetic, and its operations on a processor at tiny sizes."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from longstraw.config import load_model_config
from longstraw.ops import choose_ops

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"  # no package that is installed
spec = importlib.util.spec_from_file_location("benchmarks_gpu", SCRIPT)
script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
Bench, Clock, interpolated, main = script.Bench, script.Clock, script.interpolated, script.main


def pieces(evaluated, chunks=9, size=64, last=10):
    """Return chunks of which only some were evaluated; a full one takes 2 s and 0.01 s more a position before it."""
    starts = [(i * size, size if i < chunks - 1 else last) for i in range(chunks)]
    cost = [(2 + 0.01 * start) * count / size for start, count in starts]
    return [(start, count, cost[i] if i in evaluated else 0.001) for i, (start, count) in enumerate(starts)], sum(cost)


def test_the_time_of_all_chunks_follows_from_those_at_the_ends():
    some, whole = pieces({0, 1, 7, 8})
    assert interpolated(some) == pytest.approx(whole, rel=1e-9)
    assert sum(seconds for *_, seconds in some) < 0.6 * whole  # a control: what was evaluated alone is far less


def test_chunks_may_come_from_last_to_first():
    some, whole = pieces({0, 1, 7, 8})
    assert interpolated(some[::-1]) == pytest.approx(whole, rel=1e-9)


def test_branches_that_were_stood_in_for_count_as_the_second():
    assert interpolated([(0, 20, 9.0), (20, 20, 5.0), *((i, 20, 0.0) for i in (40, 60, 80)), (100, 20, 5.0)]) == 30.0


def test_few_pieces_are_added():
    assert interpolated([(0, 64, 1.0), (64, 10, 0.5)]) == 1.5


@pytest.mark.parametrize("model", ["qwen3_6_tiny", "glm_5_2_tiny"])
def test_every_operation_is_timed(model):
    bench = Bench(Clock(torch.device("cpu"), rounds=1), choose_ops("cpu"), ranks=2, rows=96, chunk=64)
    timed = list(bench.run(load_model_config(model)))
    assert len(timed) == len({x.name for x in timed}) == (8 if model == "qwen3_6_tiny" else 5)
    assert all(x.seconds > 0 and x.bytes > 0 and x.flops > 0 for x in timed)


def test_what_is_mistyped_is_told(capsys):
    assert main(["model=qwen3_6_tiny", "rank=8"]) == 2
    assert "ranks" in capsys.readouterr().err
    assert main(["device=cuda"]) == 2
    assert "no GPU" in capsys.readouterr().err
