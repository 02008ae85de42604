"""What the counted peak grows with: not with the group, and with the context by the state and nothing else."""

import json
from itertools import pairwise

import pytest
from jobs import cpu_job

from longstraw.tracking.recorder import RunIdentity
from longstraw.training.loop import run_job


def peak(folder, context, group_size, **changes):
    keys = {"context": context, "group_size": group_size, "response_length": 64, "chunk": 512}
    config = cpu_job({}, data={"ragged": False}, **keys | changes)
    folder.mkdir()
    run_job(config, folder, RunIdentity("x"))
    return json.loads((folder / "records.jsonl").read_text())


@pytest.mark.slow
def test_the_peak_does_not_grow_with_the_group(tmp_path):
    two, eight = (peak(tmp_path / str(g), 4096, g) for g in (2, 8))
    assert eight["peak_by_verb"] == two["peak_by_verb"]  # to the byte
    assert eight["peak_allocated_bytes"] == two["peak_allocated_bytes"]
    assert eight["replayed_positions"] == 4 * two["replayed_positions"]
    waits = 64 * (8 + 4)  # ids and log-probabilities of a response, on the host
    assert eight["host_bytes"] - two["host_bytes"] == 6 * -(-waits // 512) * 512


@pytest.mark.parametrize(("prompt_grad", "contexts"), [("detached", (1536, 3072, 6144)), ("exact", (1536, 3072))])
def test_doubling_the_context_adds_the_state_and_nothing_of_its_order(tmp_path, prompt_grad, contexts):
    rows = [peak(tmp_path / str(c), c, 2, prompt_grad=prompt_grad) for c in contexts]
    verb = {"detached": "prefill", "exact": "prompt_backward"}[prompt_grad]  # a replay also grows up to a tile of rows
    keys = ["retained_bytes"] + ["state_gradient_bytes", "snapshot_bytes"] * (prompt_grad == "exact")
    for less, more in pairwise(rows):
        state = sum(more[key] - less[key] for key in keys)
        tokens = (more["context"] - less["context"]) * 8
        held, before = more["peak_by_verb"][verb], less["peak_by_verb"][verb]
        # the recurrent state of the chunk that is being evaluated, and what rounding to blocks leaves
        assert abs(held - before - state - tokens) < 0.02 * held
        assert state > 0.05 * before  # or there would be nothing to see
