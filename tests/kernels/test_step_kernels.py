"""The whole step over the CUDA path's ops, in float32 under the interpreter, against float64 over plain ones.

One model a layer kind: full attention, Gated DeltaNet, latent attention with its indexer. Bars are those of float32.
"""

from unittest import mock

import pytest
import torch
from glm_helpers import FROZEN, glm_model
from helpers import furthest, make_group, oracle, take_gradients, tiny_model, worst

from longstraw.ops.attention import fused as attention
from longstraw.ops.logprob import fused as logprob
from longstraw.step import grpo_step

BAR = 1e-4
SMALL = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 100}
FULL = SMALL | {"num_hidden_layers": 1, "full_attention_interval": 1}
DELTA = SMALL | {
    "num_hidden_layers": 1,
    "full_attention_interval": 3,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
}


def gradients(model):
    """Return the gradients by name, but of what has none, and clear them."""
    found = {name: p.grad for name, p in model.named_parameters() if FROZEN not in name}
    model.zero_grad(set_to_none=True)
    return found


def pair(build, **overrides):
    """Return one model in float32 on the CUDA path's ops and in float64 on the references."""
    fused = build(dtype=torch.float32, backend="cuda", **overrides)
    plain = build(backend="reference", **overrides)
    plain.load_state_dict(fused.state_dict())
    return fused, plain


@pytest.mark.parametrize("overrides", [FULL, DELTA], ids=["full attention", "delta"])
def test_exact_step_is_plain_autograd(overrides):
    fused, plain = pair(tiny_model, **overrides)
    group = make_group(plain, 66, (3, 1))
    loss, logprobs = oracle(plain, group)
    target = take_gradients(plain)
    result = grpo_step(fused, group, chunk=64)
    distance, name = worst(take_gradients(fused), target)
    assert distance < BAR, name
    assert result.loss.item() == pytest.approx(loss.item(), rel=BAR)
    assert furthest(result.logprobs, logprobs) < BAR


def test_exact_step_of_latent_attention():
    fused, plain = pair(glm_model, num_hidden_layers=1)
    group = make_group(plain, 66, (3, 1))
    expected = grpo_step(plain, group, chunk=64)
    target = gradients(plain)
    result = grpo_step(fused, group, chunk=64)
    distance, name = worst(gradients(fused), target)
    assert distance < BAR, name
    assert furthest(result.logprobs, expected.logprobs) < BAR


def test_the_kernels_are_what_ran():
    fused, plain = pair(tiny_model, **FULL)
    group = make_group(plain, 66, (3, 1))
    oracle(plain, group)
    target = take_gradients(plain)
    lost = lambda *inputs: torch.zeros_like(inputs[1], dtype=torch.float32)  # noqa: E731
    with mock.patch.object(attention, "_attention_rows_backward", lost):
        grpo_step(fused, group, chunk=64)
    assert worst(take_gradients(fused), target)[0] > 1e-2
    with mock.patch.object(logprob, "SPLIT", 64):  # another way through the same sum
        grpo_step(fused, group, chunk=64)
    assert worst(take_gradients(fused), target)[0] < BAR
