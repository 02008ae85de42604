"""Helpers for tests of GLM-5.2: models in which every part matters, plain ops, transformers as oracle."""

import contextlib
from unittest import mock

import torch
from helpers import oracle
from torch.nn import functional as F

from longstraw.config import AlgorithmConfig
from longstraw.grpo import BranchTerms, advantages, branch_loss, denominators
from longstraw.models import build_model
from longstraw.ops.latent import reference
from longstraw.ops.sequence_ops import Local

F64 = torch.float64
FROZEN = ".indexer."
_SELECT = reference.select_rows


def glm_model(seed=0, dtype=F64, **overrides):
    """Return the tiny model with large weights and preferred experts; ``indexer_types`` etc. may be overridden."""
    model = build_model("glm_5_2_tiny", seed=seed, dtype=dtype, **overrides)
    redraw(model, seed)
    return model


@torch.no_grad()
def redraw(model, seed=0):
    """Redraw matrices large, norms off their centre, the experts' selection bias off 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
        elif "rotary" in name:
            continue
        elif tensor.dim() == 1:
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
        else:
            tensor.normal_(0, 0.15, generator=generator)


def glm_oracle(model, group, algorithm=None, *, border=0):
    """Add the gradient of the group's loss by plain autograd, a whole sequence a graph, over plain ops."""
    with plain_glm_ops(model):
        return oracle(model, group, algorithm, border=border)


@contextlib.contextmanager
def plain_glm_ops(model):
    """Replace the choice of rows, the attention over them and the experts by plain ones on whole tensors."""
    with (
        mock.patch.object(Local, "select_rows", _select),
        mock.patch("longstraw.ops.sequence_ops.attend_rows", plain_attend_rows),
        mock.patch("longstraw.ops.sequence_ops.mix_experts", plain_experts),
    ):
        yield


def _select(self, q, weights, key, past, count, *, scale):
    return plain_select(q, weights, past.rows("index_key"), key, count, scale=scale)


def plain_select(q, weights, past_key, key, count, *, scale):
    """Score everything at once and sort it, stably."""
    keys = torch.cat([past_key, key])
    scores = torch.einsum("tid,sd->tis", q, keys).mul(scale).relu()
    scores = torch.einsum("ti,tis->ts", weights, scores)
    future = torch.arange(len(keys)) > torch.arange(len(past_key), len(keys))[:, None]
    best = scores.masked_fill(future, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    best = best[:, : min(count, len(keys))]
    return best.masked_fill(future.gather(1, best), -1).sort(-1).values.int()


def plain_attend_rows(q, new, rows, past, *, scale, ops=None):
    """Join past and new, and take the softmax of the whole score matrix with all but the chosen rows hidden."""
    latents = torch.cat([past.rows[0], new[0]])
    keys = torch.cat([torch.cat(past.rows, -1), torch.cat(new, -1)])
    chosen = torch.zeros(len(q), len(keys) + 1, dtype=torch.bool).scatter_(1, rows.long() % (len(keys) + 1), True)
    scores = torch.einsum("thc,sc->ths", q, keys) * scale
    scores = scores.masked_fill(~chosen[:, None, :-1], -torch.inf)
    return torch.einsum("ths,sc->thc", scores.softmax(-1), latents), scores.logsumexp(-1)


def plain_experts(x, chosen, weights, gate_up, down, *, ops=None):
    """Run every expert on every token, with weight 0 for tokens not routed to it."""
    gate, up = torch.einsum("td,eid->tei", x, gate_up).chunk(2, -1)
    results = torch.einsum("tei,edi->ted", F.silu(gate) * up, down)
    share = torch.zeros(len(x), len(down), dtype=weights.dtype).scatter(1, chosen, weights)
    return torch.einsum("te,ted->td", share, results)


def glm_gradients(model):
    """Return the gradients by name and clear them; the indexers, and they alone, have none."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if FROZEN not in name}
    assert None not in gradients.values()
    assert all(p.grad is None for name, p in model.named_parameters() if FROZEN in name)
    model.zero_grad(set_to_none=True)
    return gradients


def rows_chosen(model, tokens, chunk):
    """Return the rows that each indexer chooses for each of ``tokens``, as sets, and the final hidden states."""
    states, hidden, calls = model.new_states(len(tokens)), [], []

    def recorded(*args, **kwargs):
        calls.append(_SELECT(*args, **kwargs))
        return calls[-1]

    with torch.no_grad(), mock.patch.object(reference, "select_rows", recorded):
        for piece in tokens.split(chunk):
            out, updates = model(piece, [s.leaves(s.positions, grad=False) for s in states])
            hidden.append(out)
            for state, update in zip(states, updates, strict=True):
                state.absorb(update, len(piece))
    layers = [i for i, block in enumerate(model.model.layers) if block.mixer.indexer is not None]
    chosen = {
        layer: [{row for row in line if row >= 0} for rows in calls[i :: len(layers)] for line in rows.tolist()]
        for i, layer in enumerate(layers)
    }
    return chosen, torch.cat(hidden)


# transformers


def hf_model(folder, seed=0, **overrides):
    """Return transformers' model of the tiny sizes, saved to ``folder``; its latent norms have an epsilon of 1e-6."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    ours = build_model("glm_5_2_tiny", device="meta").config
    names = GlmMoeDsaConfig().to_dict().keys() & vars(ours).keys() - {"dtype"}
    sizes = {name: getattr(ours, name) for name in names} | overrides
    rope = {"rope_type": "default", "rope_theta": ours.rope_theta}
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**sizes, rope_parameters=rope)).float()
    model.config._attn_implementation, model.config._experts_implementation = "eager", "eager"
    redraw(model, seed)
    model.save_pretrained(folder)
    return model


@contextlib.contextmanager
def stable_ties():
    """Let transformers' top-k break ties by position, as ours does; PyTorch's does so by the tensor's shape."""

    def topk(x, k, dim=-1, **_):
        ordered = x.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((ordered.values[..., :k], ordered.indices[..., :k]))

    with mock.patch.object(torch.Tensor, "topk", topk):
        yield


def hf_step(model, group, algorithm=None):
    """Return loss, log-probabilities and gradients of the group by transformers, a whole sequence a graph."""
    algorithm = algorithm or AlgorithmConfig()
    loss, logprobs = 0.0, []
    shares = denominators(group, algorithm, max(group.response_positions))
    for response, advantage, denominator, old in zip(
        group.responses, advantages(group.rewards, True), shares, group.old_logprobs, strict=True
    ):
        tokens = torch.cat([group.prompt, response[:-1]])
        logits = model(tokens[None], use_cache=False).logits[0, len(group.prompt) - 1 :]
        lp = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        branch = branch_loss(
            lp, BranchTerms(advantage=advantage, denominator=denominator, old_logprobs=old), algorithm
        ).loss
        branch.backward()
        loss += branch.detach()
        logprobs.append(lp.detach())
    return loss, logprobs, glm_gradients(model)
