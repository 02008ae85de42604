"""GLM-5.2 against transformers' own class in float32: the same file, the same log-probabilities, the same gradients."""

import copy
from unittest import mock

import pytest
import torch
from glm_helpers import glm_gradients, glm_model, hf_model, hf_step, rows_chosen, stable_ties
from helpers import furthest, make_group, worst

from longstraw.layers import feedforward
from longstraw.models import load_model
from longstraw.models.glm_5_2 import Glm52Block
from longstraw.models.hf_save import save_model
from longstraw.ops.latent import reference
from longstraw.step import grpo_step

LOGPROB_BAR, GRADIENT_BAR = 1e-4, 1e-4
DENSE, SPARSE = 1024, 32  # rows a query: above every length, and few
CASES = [(2, (1, 3), 64), (64, (5, 1, 7), 64), (193, (9, 30), 128), (257, (2, 33), 64), (321, (20, 9, 3), 192)]


@pytest.fixture(scope="module", params=[DENSE, SPARSE], ids=["dense", "sparse"])
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("glm")
    theirs = hf_model(folder, index_topk=request.param)
    return theirs, load_model(folder, dtype="float32", latent_norm_eps=1e-6), request.param


def distances(theirs, ours, group, chunk):
    """Return the largest differences of log-probabilities and, relative, of gradients."""
    with stable_ties():
        _, logprobs, target = hf_step(theirs, group)
    result = grpo_step(ours, group, chunk=chunk)
    return furthest(result.logprobs, logprobs), *worst(glm_gradients(ours), target)


def test_names_and_shapes_are_theirs(pair):
    theirs, ours, _ = pair
    for named in ("named_parameters", "named_buffers"):
        expected = {n: t.shape for n, t in getattr(theirs, named)() if "rotary" not in n}
        assert {n: t.shape for n, t in getattr(ours, named)()} == expected
    loaded = dict(theirs.state_dict())
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize(("positions", "lengths", "chunk"), CASES)
def test_logprobs_and_gradients(pair, positions, lengths, chunk):
    theirs, ours, _ = pair
    group = make_group(ours, positions, lengths)
    logprobs, gradient, name = distances(theirs, ours, group, chunk)
    assert logprobs < LOGPROB_BAR
    assert gradient < GRADIENT_BAR, name


def test_a_tied_head_is_theirs(tmp_path):
    theirs = hf_model(tmp_path, tie_word_embeddings=True)
    ours = load_model(tmp_path, dtype="float32", latent_norm_eps=1e-6)
    group = make_group(ours, 65, (5, 1, 7))
    logprobs, gradient, name = distances(theirs, ours, group, 64)
    assert logprobs < LOGPROB_BAR
    assert gradient < GRADIENT_BAR, name
    with torch.no_grad():
        ours.lm_head.weight[7] += 0.1
    assert distances(theirs, ours, group, 64)[0] > LOGPROB_BAR


@pytest.mark.parametrize("pair", [DENSE], indirect=True, scope="module")
def test_dense_needs_no_order_of_ties(pair):
    """With few rows it does: transformers breaks ties by the tensor's shape."""
    theirs, ours, _ = pair
    group = make_group(ours, 257, (9, 30))
    _, logprobs, target = hf_step(theirs, group)
    result = grpo_step(ours, group, chunk=64)
    assert furthest(result.logprobs, logprobs) < LOGPROB_BAR
    assert worst(glm_gradients(ours), target)[0] < GRADIENT_BAR


def test_few_rows_matter(pair):
    """The sparse model is another model than the dense one: what passes above chose rows."""
    _, ours, rows = pair
    chosen, _ = rows_chosen(ours, torch.arange(200) % 256, 64)
    assert {len(line) for layer in chosen.values() for line in layer[100:]} == (
        {32} if rows == SPARSE else set(range(101, 201))
    )


def _handed_from_the_first(block, x, past, handed):
    """Give shared layers the rows that the first layer chose, not those of the last indexer before them."""
    first = handed[0] if isinstance(handed, tuple) else None
    mixed, update, rows = block.self_attn(x, past, first)
    return mixed, update, (rows if first is None else first, None)


def _unmasked(q, weights, parts, queried, count, *, scale):
    return _BEST(q, weights, parts, queried.clamp(min=int(queried[-1])), count, scale=scale)


def _biased(logits, bias, count, *, normalise, scale):
    """Weigh with the scores that chose, the bias included."""
    chosen, _ = _ROUTE(logits, bias, count, normalise=normalise, scale=scale)
    weights = (logits.sigmoid() + bias).gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) * scale


_BEST, _ROUTE = reference.best_rows, feedforward.route
WRONG = {
    "an unmasked future row": (reference, "best_rows", _unmasked),
    "the bias in the weights": (feedforward, "route", _biased),
}


def assert_far(theirs, ours):
    logprobs, gradient, _ = distances(theirs, ours, make_group(ours, 193, (9, 30)), 128)
    assert logprobs > 10 * LOGPROB_BAR
    assert gradient > 10 * GRADIENT_BAR


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_fails(pair, wrong):
    with mock.patch.object(*WRONG[wrong]):
        assert_far(*pair[:2])


@pytest.mark.parametrize("pair", [SPARSE], indirect=True, scope="module")
def test_rows_of_the_wrong_layer_fail(pair):
    """Where every row is chosen all layers choose the same: only few rows can tell."""
    with mock.patch.object(Glm52Block, "mix", _handed_from_the_first):
        assert_far(*pair[:2])


def test_one_scaled_expert_fails(pair):
    theirs, ours, _ = pair
    ours = load_model(ours.config.checkpoint, dtype="float32", latent_norm_eps=1e-6)
    with torch.no_grad():
        ours.model.layers[4].mlp.experts.down_proj[3] *= 1.5
    assert_far(theirs, ours)


def test_the_epsilon_of_latent_norms_is_a_field(pair, tmp_path):
    """The published config says 1e-5, transformers computes with 1e-6: with tiny latents that is seen."""
    theirs = copy.deepcopy(pair[0])
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.self_attn.kv_a_proj_with_mqa.weight.mul_(1e-2)
    theirs.save_pretrained(tmp_path)
    assert load_model(tmp_path).config.latent_eps == 1e-5
    tokens, hidden = torch.arange(65) % 256, {}
    for eps in (None, 1e-6):
        ours = load_model(tmp_path, dtype="float32", latent_norm_eps=eps)
        hidden[eps] = rows_chosen(ours, tokens, 64)[1]
    with torch.no_grad(), stable_ties():
        target = theirs.model(tokens[None], use_cache=False).last_hidden_state[0]
    assert float((hidden[1e-6] - target).abs().max()) < 1e-4
    assert float((hidden[None] - target).abs().max()) > 1e-3


def test_a_model_of_ours_loads_there(tmp_path):
    """Saved without any checkpoint behind it, the tiny model says all that transformers has to know."""
    from transformers import GlmMoeDsaForCausalLM

    ours = glm_model(dtype=torch.float32, latent_norm_eps=1e-6)
    save_model(ours, tmp_path)
    theirs = GlmMoeDsaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float()
    tokens = torch.arange(65) % 256
    with torch.no_grad(), stable_ties():
        target = theirs.model(tokens[None], use_cache=False).last_hidden_state[0]
    hidden = rows_chosen(ours, tokens, 64)[1]
    assert float((hidden - target).abs().max()) < 1e-4
    with torch.no_grad():
        ours.model.layers[3].mlp.gate.e_score_correction_bias += torch.arange(8)
    assert float((rows_chosen(ours, tokens, 64)[1] - target).abs().max()) > 1e-2
