"""The self-check over the CUDA path's ops, small and in float32: it passes, and sees what a compiler might break."""

import pytest
import torch

from longstraw.config import load_model_config
from longstraw.layers.op_cases import Draw
from longstraw.ops.attention import fused as attention
from longstraw.selfcheck import check_ops

CPU = torch.device("cpu")


def failed(model, positions=5, rows=20, **sizes):
    config = load_model_config(model, hidden_size=32, vocab_size=100, **sizes)
    found = check_ops(config, Draw(CPU, torch.float32, 0), backend="cuda", positions=positions, rows=rows)
    return [f"{x.op}: {x.tensor}" for x in found if not x.passed], found


SIZES = {"qwen3_6_tiny": {"linear_num_key_heads": 1, "linear_num_value_heads": 2}, "glm_5_2_tiny": {}}


@pytest.mark.parametrize("model", SIZES)
def test_the_kernels_pass(model):
    wrong, found = failed(model, **SIZES[model])
    assert not wrong
    assert max(x.distance for x in found) < 1e-4


def test_a_lost_gradient_is_seen(monkeypatch):
    real = attention._attention_rows_backward
    monkeypatch.setattr(attention, "_attention_rows_backward", lambda *x: real(*x[:7], None, None, x[9]))
    wrong, _ = failed("qwen3_6_tiny", **SIZES["qwen3_6_tiny"])
    assert wrong == ["attention: gradient of retained key", "attention: gradient of retained value"]
