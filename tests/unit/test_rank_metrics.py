"""One record from what every rank says."""

import pytest

from longstraw.training.rank_metrics import merge, reduce_rank_metrics


def row(peak, loss, positions, seconds, verb="replay", kl=None):
    return {
        "peak_allocated_bytes": peak,
        "peak_verb": verb,
        "loss": loss,
        "kl": kl,
        "prefilled_positions": positions,
        "prompt_positions": positions + 1,
        "recompute_difference": loss / 10,
        "seconds_by_verb": {"replay": seconds},
    }


ROWS = [row(5, 1.0, 100, 1.0), row(9, 1.0, 100, 2.0, "prefill"), row(7, 3.0, 60, 4.0), row(6, 3.0, 60, 3.0)]


def test_two_prompts_side_by_side():
    merged = merge(ROWS, prompts=2)
    assert merged["peak_allocated_bytes"] == 9
    assert merged["peak_verb"] == "prefill"  # of the rank with the highest peak
    assert merged["peak_allocated_bytes_by_rank"] == [5, 9, 7, 6]
    assert merged["loss"] == 2.0  # one of each prompt
    assert merged["prefilled_positions"] == 160
    assert merged["prompt_positions"] == 101
    assert merged["recompute_difference"] == pytest.approx(0.3)
    assert merged["seconds_by_verb"] == {"replay": 4.0}
    assert merged["kl"] is None


def test_what_one_prompt_lacks_is_null():
    rows = [dict(ROWS[0]), {**ROWS[1], "loss_drift": 0.1}, dict(ROWS[2]), {**ROWS[3], "loss_drift": 0.2}]
    assert merge(rows, prompts=2)["loss_drift"] is None


def test_one_prompt():
    assert merge(ROWS[:2], prompts=1)["prefilled_positions"] == 100


def test_one_rank():
    assert reduce_rank_metrics(ROWS[0], None) == ROWS[0] | {"peak_allocated_bytes_by_rank": [5]}
