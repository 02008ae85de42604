"""Helpers for numerics tests: small models and groups, an oracle by plain autograd, and one way to compare."""

import contextlib
import math
from unittest import mock

import torch
from torch.nn import functional as F

from longstraw.config import AlgorithmConfig
from longstraw.group import Group
from longstraw.grpo import BranchTerms, advantages, branch_loss, denominators
from longstraw.models import build_model
from longstraw.models.lora import save_adapter
from longstraw.ops.delta import reference as delta
from longstraw.ops.sequence_ops import Local
from longstraw.state import Past
from longstraw.step import grpo_step, score_fresh

F64 = torch.float64
RECURRENT_UP_TO = 140  # positions that the oracle's delta rule takes one by one; more in one plain chunked graph


def tiny_model(seed=0, dtype=F64, **overrides):
    """Return a model in which every part matters: large weights, and exp(g) above 0.99 so that no state is forgotten.

    Four layers by default, delta and full in turn, so that each kind reads what the other wrote.
    """
    overrides = {"num_hidden_layers": 4, "full_attention_interval": 2, "intermediate_size": 96} | overrides
    model = build_model("qwen3_6_tiny", seed=seed, dtype=dtype, **overrides)
    enlarge(model.named_parameters(), seed)
    return model


@torch.no_grad()
def enlarge(named_parameters, seed=0):
    """Redraw parameters: matrices large, norms off their centre, decays slow."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in named_parameters:
        if name.endswith("A_log"):
            parameter.uniform_(-7, -5.3, generator=generator)
        elif name.endswith("dt_bias"):
            parameter.uniform_(-1, 0, generator=generator)
        elif "conv1d" in name:
            parameter.normal_(0, 0.5, generator=generator)
        elif parameter.dim() == 1:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        else:
            parameter.normal_(0, 0.1, generator=generator)


def moe_model(seed=0, dtype=F64, **overrides):
    """Return Qwen3.6's tiny mixture of experts with large weights, delta and full layers in turn."""
    model = build_model("qwen3_6_moe_tiny", seed=seed, dtype=dtype, **{"full_attention_interval": 2} | overrides)
    enlarge(model.named_parameters(), seed)
    return model


def make_group(model, positions, lengths, *, seed=0, masked=False, noise=0.3):
    """Return a group with a prompt of ``positions`` tokens and a response of each length.

    ``old_logprobs`` are the policy's own plus noise, so that ratios lie on both sides of the clip. A mask leaves
    out the middle of long responses.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(count):
        return torch.randint(model.config.vocab_size, (count,), generator=generator)

    prompt, responses = ids(positions), [ids(n) for n in lengths]
    rewards = [i % 2 + 0.1 * i for i in range(len(lengths))]
    masks = [(torch.arange(n) < n // 3) | (torch.arange(n) >= n // 2) for n in lengths] if masked else None
    policy = score_fresh(model, Group(prompt, responses, rewards), chunk=1024)
    old = [lp + noise * torch.randn(len(lp), generator=generator, dtype=lp.dtype) for lp in policy]
    return Group(prompt, responses, rewards, old_logprobs=old, loss_masks=masks)


def oracle(model, group, algorithm=None, *, reference=None, border=0):
    """Add the gradient of the group's loss by plain autograd, a whole sequence a graph; return loss, log-probabilities.

    Ops are plain PyTorch that autograd differentiates by itself, nothing is checkpointed, prompts are not shared.
    The state of positions before ``border`` is a constant: 0 is the exact gradient, P - 1 the detached one.
    """
    algorithm = algorithm or AlgorithmConfig()
    length = max(group.response_positions)
    loss, logprobs = 0.0, []
    per_branch = zip(
        group.responses,
        advantages(group.rewards, algorithm.scale_rewards),
        denominators(group, algorithm, length),
        group.old_logprobs,
        group.loss_masks or [None] * len(group.responses),
        strict=True,
    )
    with plain_ops(model):
        for response, advantage, denominator, old, mask in per_branch:
            lp = _whole_sequence(model, group.prompt, response, border)
            branch = branch_loss(
                lp,
                BranchTerms(
                    advantage=advantage,
                    denominator=denominator,
                    old_logprobs=old,
                    reference_logprobs=_reference_logprobs(reference, group.prompt, response),
                    mask=mask,
                ),
                algorithm,
            ).loss
            branch.backward()
            loss += branch.detach()
            logprobs.append(lp.detach())
    return loss, logprobs


def _whole_sequence(model, prompt, response, border):
    tokens = torch.cat([prompt, response[:-1]])
    past = [state.leaves(0, grad=False) for state in model.new_states(0)]
    if border:
        with torch.no_grad():
            past = [Past(border, update) for update in model(tokens[:border], past)[1]]
    hidden, _ = model(tokens[border:], past)
    return model.logprobs(hidden[len(prompt) - 1 - border :], response)[0]


def _reference_logprobs(reference, prompt, response):
    if reference is None:
        return None
    with torch.no_grad(), plain_ops(reference):
        return _whole_sequence(reference, prompt, response, 0)


@contextlib.contextmanager
def plain_ops(model):
    """Replace every op of ``model`` by a plain one with no backward of its own, and checkpointing by nothing."""
    context = Local(model.ops.attention, model.ops.latent, model.ops.moe, plain_logits)
    ops = model.ops._replace(delta=plain_delta, conv=plain_conv, context=context)
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "ops"):
                stack.enter_context(mock.patch.object(module, "ops", ops))
        stack.enter_context(mock.patch("longstraw.ops.sequence_ops.attend", plain_attend))
        stack.enter_context(mock.patch("longstraw.models.decoder.checkpoint", lambda block, *args, **_: block(*args)))
        yield


def plain_attend(q, k, v, past, *, scale, parts=None):
    """Join past and new and take the softmax of the whole score matrix."""
    joined = (torch.cat(x) for x in zip(past.rows, (k, v), strict=True))
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in joined)
    count, past = len(q), len(past.rows[0])
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    hidden = torch.arange(past + count) > torch.arange(past, past + count)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def plain_delta(q, k, v, g, beta, state):
    """Take the delta rule one position after the other; a long sequence in one graph of its chunked form."""
    return (delta.recurrent if len(v) <= RECURRENT_UP_TO else delta._segment)(q, k, v, g, beta, state)


def plain_conv(x, weight, tail):
    """Convolve by PyTorch's own operator."""
    joined = torch.cat([tail, x])
    return F.silu(F.conv1d(joined.T[None], weight[:, None], groups=len(weight))[0].T), joined[len(x) :]


def plain_logprobs(hidden, weight, targets):
    """Make all logits and take their log-softmax."""
    logs = (hidden @ weight.T).log_softmax(-1)
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def plain_logits(hidden, weight, targets):
    """Make all logits; return the target's, the log-sum-exp and the mean."""
    logits = hidden @ weight.T
    lse = logits.logsumexp(-1)
    return logits.gather(1, targets[:, None])[:, 0], lse, (logits.softmax(-1) * logits).sum(-1)


@torch.no_grad()
def hf_logprobs(model, group):
    """Return the log-probabilities of each response by transformers' model, each after its own prompt."""
    rows = [torch.cat([group.prompt, response[:-1]]) for response in group.responses]
    logits = [model(row[None], use_cache=False).logits[0, group.prompt_positions - 1 :] for row in rows]
    pairs = zip(logits, group.responses, strict=True)
    return [values.log_softmax(-1).gather(1, response[:, None])[:, 0] for values, response in pairs]


def whole_sequences(model, group):
    """Add the gradient of the group's loss by transformers' model, each response after its own prompt.

    Returns log-probabilities.
    """
    algorithm, logprobs = AlgorithmConfig(), []
    per_branch = zip(
        group.responses, advantages(group.rewards), denominators(group, algorithm, 0), group.old_logprobs, strict=True
    )
    for response, advantage, denominator, old in per_branch:
        tokens = torch.cat([group.prompt, response[:-1]])
        logits = model(tokens[None], use_cache=False).logits[0, len(group.prompt) - 1 :]
        lp = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        branch_loss(lp, BranchTerms(advantage, denominator, old), algorithm).loss.backward()
        logprobs.append(lp.detach())
    return logprobs


def assert_step_is_theirs(theirs, ours, group, bar):
    """Compare a step with transformers' model on whole sequences; of a detached one only the gradients differ."""
    logprobs = whole_sequences(theirs, group)
    target = take_gradients(theirs)
    result = grpo_step(ours, group, chunk=64)
    distance, name = worst(take_gradients(ours), target)
    assert furthest(result.logprobs, logprobs) < bar
    assert distance < bar, name
    detached = grpo_step(ours, group, chunk=64, prompt_grad="detached")
    assert furthest(detached.logprobs, logprobs) < bar
    assert relative(whole(take_gradients(ours)), whole(target)) > 1e-2


def assert_adapter_is_theirs(fresh, ours, folder, *, adapted, bar):
    """Give ``ours`` an adapter that matters, save it to ``folder`` and compare a step with PEFT's on ``fresh``.

    ``fresh`` is transformers' model of the same weights, of which PEFT must find ``adapted`` modules.
    """
    from peft import PeftModel

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for n, parameter in ours.named_parameters():
            if "lora_B" in n:
                parameter.normal_(0, 0.1, generator=generator)
    save_adapter(ours, folder)
    wrapped = PeftModel.from_pretrained(fresh, folder, is_trainable=True)
    group = make_group(ours, 130, (9, 20))
    logprobs = whole_sequences(wrapped, group)
    target = {n.removeprefix("base_model.model."): p.grad for n, p in wrapped.named_parameters() if p.requires_grad}
    result = grpo_step(ours, group, chunk=64)
    assert len(target) == 2 * adapted
    distance, name = worst({n: p.grad for n, p in ours.named_parameters() if p.requires_grad}, target)
    assert distance < bar, name
    assert furthest(result.logprobs, logprobs) < bar


def take_gradients(model):
    """Return the gradients by name and clear them."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    assert None not in gradients.values()
    return gradients


def relative(value, target):
    """Return |value - target| / |target| in L2; NaN counts as infinitely far."""
    distance = float((value.detach() - target.detach()).norm() / target.detach().norm())
    return math.inf if math.isnan(distance) else distance


def worst(values, targets):
    """Return the largest relative L2 distance by name, and the name."""
    assert values.keys() == targets.keys()
    distances = {name: relative(values[name], target) for name, target in targets.items()}
    name = max(distances, key=distances.__getitem__)
    return distances[name], name


def whole(gradients):
    """Return all gradients as one vector."""
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def furthest(logprobs, others):
    """Return the largest absolute difference between two lists of log-probabilities."""
    return max(float((a - b).abs().max()) for a, b in zip(logprobs, others, strict=True))
