"""The arithmetic that models say of their passes: numbers that were worked out elsewhere, and what torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longstraw.config import from_dict, option
from longstraw.models import build_model
from longstraw.training.flops import Evaluated, step_flops

PROMPT = 2**20


@pytest.fixture(scope="module")
def big():
    return build_model("qwen3_6_27b", device="meta")


def configured(**keys):
    groups = {"model": option("model", "qwen3_6_27b"), "hardware": option("hardware", "cpu")}
    return from_dict(groups | {"data": {"name": "needle"}, "context": PROMPT + 8192, "response_length": 8192} | keys)


def flops_of(model, **keys):
    lengths = {"prompt_positions": PROMPT + 1, "responses": [8192] * 8}
    return step_flops(model, configured(**keys), Evaluated(**lengths, prefilled=True))


def attention(model, start, end):
    """Return what the positions before ``start`` add."""
    return model.flops(start, end) - model.flops(0, end - start)


def test_the_published_qwen(big):
    token = big.flops(0, 1)
    delta = big.flops(0, 2) - 2 * token  # one pair more: attention
    assert delta == 393_216
    linear = sum(block.mlp.flops(1) for block in big.model.layers)
    cores = 0
    for block in big.model.layers:
        weights = sum(2 * p.numel() for p in block.mixer.parameters() if p.dim() == 2)
        linear += weights
        cores += block.mixer.flops(0, 1, False) - weights
    assert linear == pytest.approx(48.70e9, rel=1e-3)
    assert linear + cores == token
    assert big.head_flops(1) == pytest.approx(2.54e9, rel=2e-3)
    assert attention(big, 999, 1000) == 393_216 * 999
    assert big.flops(PROMPT, PROMPT + 8192) == pytest.approx(8192 * (49.03e9 + 393_216 * (PROMPT + 4096.5)), rel=1e-3)


def test_the_delta_rule_of_the_published_qwen():
    """The published number counts products of keys for every value head, ours for every key head."""

    def cores(model):
        layers = [block.mixer for block in model.model.layers if hasattr(block, "linear_attn")]
        weights = sum(2 * p.numel() for layer in layers for p in layer.parameters() if p.dim() == 2)
        return sum(layer.flops(0, 1, False) for layer in layers) - weights

    spread = build_model("qwen3_6_27b", device="meta", linear_num_key_heads=48)
    convolution = 48 * 2 * 3 * 48 * 128 * 4  # of the spread model, whose keys are as wide as its values
    assert cores(spread) - convolution == pytest.approx(0.377e9, rel=2e-3)
    assert cores(build_model("qwen3_6_27b", device="meta")) < cores(spread)


def test_the_published_glm():
    glm = build_model("glm_5_2", device="meta")
    chosen = [block.mixer for block in glm.model.layers]

    def rows(start, end):
        return sum(2 * m.heads * (2 * 512 + 64) * m._chosen(start, end) for m in chosen)

    assert rows(999, 1000) == 10_862_592 * 1000
    assert rows(9999, 10000) == 10_862_592 * 2048
    assert rows(2000, 2100) == 10_862_592 * (sum(range(2001, 2049)) + 52 * 2048)
    scores = attention(glm, 9999, 10000) - 10_862_592 * 2047
    assert scores == pytest.approx(174_048 * 9999, rel=5e-3)
    assert glm.flops(0, 2**21) == pytest.approx(5.94e17, rel=5e-3)


def test_a_step(big):
    passes, head = big.flops(PROMPT, PROMPT + 8192), big.head_flops(8192)
    detached, exact = flops_of(big), flops_of(big, prompt_grad="exact")
    prompt = big.flops(0, PROMPT, state_only=True)
    assert detached == prompt + 8 * 4 * (passes + head)
    assert exact == pytest.approx(detached + 4 * prompt, rel=1e-15)
    assert flops_of(big, prompt_grad="exact", prompt_grad_window=0) == detached
    window = flops_of(big, prompt_grad="exact", prompt_grad_window=100_000)
    start = (PROMPT - 100_000) // 16384 * 16384
    assert window == pytest.approx(detached + 4 * big.flops(start, PROMPT, state_only=True), rel=1e-15)


def test_attention_that_is_kept_is_not_evaluated_again(big):
    again, kept = (flops_of(big, prompt_grad="exact", state={"keep_attention": keep}) for keep in (False, True))
    pairs = [PROMPT * (PROMPT + 1) // 2, *[PROMPT * 8192 + 8192 * 8193 // 2] * 8]
    layers = [15, *[16] * 8]  # the last, an attention layer, is not evaluated for the state
    assert again - kept == sum(n * 4 * 24 * 256 * pair for n, pair in zip(layers, pairs, strict=True))


def test_scoring_and_a_retained_prompt(big):
    once = {"prompt_positions": 1001, "responses": [10, 20]}
    base = step_flops(big, configured(), Evaluated(**once, prefilled=False))
    prompt = step_flops(big, configured(), Evaluated(**once, prefilled=True)) - base
    scored = step_flops(big, configured(), Evaluated(**once, prefilled=False, scored=2)) - base
    assert prompt == big.flops(0, 1000, state_only=True)
    assert scored == 2 * sum(big.flops(1000, 1000 + n) + big.head_flops(n) for n in (10, 20))
    reference = step_flops(big, configured(algorithm={"kl_coef": 0.1}), Evaluated(**once, prefilled=True)) - base
    assert reference == 2 * prompt


def counted(model, positions, state_only=False):
    """Return what torch counts of a pass: matrix products only, and not the CPU's attention."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        past = [state.leaves(0, grad=False) for state in model.new_states(0)]
        model(torch.arange(positions), past, state_only=state_only)
    return counter.get_total_flops()


def pairs(model, positions):
    """Return the operations of full attention of ``positions`` to themselves, a layer."""
    return 2 * model.config.num_attention_heads * model.config.head_dim * positions * (positions + 1)


@pytest.mark.parametrize("name", ["qwen3_6_tiny", "qwen3_6_moe_tiny", "llama_tiny"])
def test_a_pass_is_what_torch_counts(name):
    """But for the triangular solve and the convolution, which torch does not count, and the CPU's attention."""
    model, positions = build_model(name), 192
    expected = model.flops(0, positions)
    for block in model.model.layers:
        if hasattr(block, "linear_attn"):
            layer = block.linear_attn
            solve = layer.value_heads * 16 * (layer.key_dim + layer.value_dim)
            expected -= positions * (solve + 2 * sum(layer.widths) * layer.taps)
        else:
            expected -= pairs(model, positions)
    assert counted(model, positions) == expected


@pytest.mark.parametrize("name", ["qwen3_6_tiny", "llama_tiny"])
def test_the_last_block_of_a_prompt_pass_is_what_torch_counts(name):
    model, positions = build_model(name), 128
    saved = counted(model, positions) - counted(model, positions, state_only=True)
    said = model.flops(0, positions) - model.flops(0, positions, state_only=True)
    assert saved == said - pairs(model, positions)


def test_adapters_are_not_counted():
    from longstraw.config import AdapterConfig
    from longstraw.models.lora import add_adapter

    pytest.importorskip("peft")
    model = build_model("glm_5_2_tiny", device="meta")
    before = model.flops(7, 300)
    assert add_adapter(model, AdapterConfig(name="lora")).flops(7, 300) == before
