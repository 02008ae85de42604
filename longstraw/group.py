"""A group: one prompt, the responses drawn for it, their rewards, and what must hold of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longstraw.units import finite_number


@dataclass(frozen=True)
class StepTotals:
    """Hold what the loss of one branch needs to know of all groups of its optimizer step."""

    groups: int
    tokens: int  # kept by the masks
    rewards: tuple[float, ...]

    @classmethod
    def of(cls, groups: Sequence[Group]) -> StepTotals:
        """Count over ``groups``, which are all those of the step."""
        rewards = tuple(reward for group in groups for reward in group.rewards)
        return cls(len(groups), sum(sum(kept_tokens(group)) for group in groups), rewards)


@dataclass
class Group:
    """Hold one prompt, the responses drawn for it and their rewards.

    Lists, tuples and arrays become int64 tensors. ``old_logprobs`` are those of the policy that wrote the responses;
    ``loss_masks`` are True for tokens the policy wrote, False for others such as a tool's output. A response whose mask
    keeps no token adds nothing to the loss, and its reward still counts in the advantages of the others.
    ``step`` is for a step of several groups; without it the group is the step's only one. ``advantages`` take the place
    of those that follow from the rewards; with them one response is enough.
    Raises ``ValueError`` that names the response and the reason.
    """

    prompt: Tensor  # [P]
    responses: list[Tensor]  # [R_i] each
    rewards: list[float]
    old_logprobs: list[Tensor] | None = None  # [R_i] each
    loss_masks: list[Tensor] | None = None  # [R_i] each
    id: str = ""
    step: StepTotals | None = None
    advantages: list[float] | None = None

    def __post_init__(self) -> None:
        self.prompt = _token_ids(self.prompt, "prompt")
        self.responses = [_token_ids(ids, f"response {i}") for i, ids in enumerate(self.responses)]
        if len(self.responses) < (2 if self.advantages is None else 1):
            raise ValueError(
                f"a group of {len(self.responses)}: advantages compare the responses to one prompt, so a group has two "
                "or more; draw more responses to this prompt"
            )
        self.rewards = [_reward(reward, i) for i, reward in enumerate(self.rewards)]
        same_count("rewards", self.rewards, self.responses)
        if self.advantages is not None:
            same_count("advantages", self.advantages, self.responses)
        if self.old_logprobs is not None:
            same_count("old_logprobs", self.old_logprobs, self.responses)
            self.old_logprobs = [_tensor(x, f"old_logprobs of response {i}") for i, x in enumerate(self.old_logprobs)]
        if self.loss_masks is not None:
            same_count("loss_masks", self.loss_masks, self.responses)
            self.loss_masks = [_mask(values, i) for i, values in enumerate(self.loss_masks)]
        for i, response in enumerate(self.responses):
            self._check_lengths(i, response)

    def _check_lengths(self, i: int, response: Tensor) -> None:
        for name, values in (("old_logprobs", self.old_logprobs), ("loss_masks", self.loss_masks)):
            if values is not None and values[i].shape != response.shape:
                raise ValueError(f"{name} of response {i}: shape {list(values[i].shape)} for {len(response)} tokens")
        if self.old_logprobs is None:
            return
        old = self.old_logprobs[i]
        if not old.is_floating_point():
            raise ValueError(f"old_logprobs of response {i}: {old.dtype}, expected floating point")
        read = torch.ones_like(response, dtype=torch.bool) if self.loss_masks is None else self.loss_masks[i]
        bad = (read & ~old.isfinite()).nonzero()
        if len(bad):
            at = int(bad[0])
            raise ValueError(f"old_logprobs of response {i}: {float(old[at])} at token {at}, must be finite")

    @property
    def prompt_positions(self) -> int:
        return len(self.prompt)

    @property
    def response_positions(self) -> list[int]:
        return [len(response) for response in self.responses]

    def to(self, device: torch.device | str) -> Group:
        """Return the same group with its prompt on ``device`` and the rest, which waits for its turn, on the host.

        What a rollout under ``torch.inference_mode`` made is copied: autograd cannot keep it.
        """

        def taken(values: Tensor, place: torch.device | str = "cpu") -> Tensor:
            values = values.to(place)
            return values.clone() if values.is_inference() else values

        moved = copy.copy(self)  # no second validation: it would read values back from the device
        moved.prompt = taken(self.prompt, device)
        moved.responses = [taken(response) for response in self.responses]
        for name in ("old_logprobs", "loss_masks"):
            values = getattr(self, name)
            setattr(moved, name, None if values is None else [taken(value) for value in values])
        return moved


def _tensor(values: Any, what: str) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{what}: cannot become a tensor: {error}") from None


def _token_ids(values: Any, what: str) -> Tensor:
    ids = _tensor(values, what)
    if ids.dim() != 1:
        raise ValueError(f"{what}: token ids of shape {list(ids.shape)}, expected one dimension")
    if ids.numel() == 0:
        raise ValueError(f"{what}: no tokens")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{what}: token ids are {ids.dtype}, expected integers")
    ids = ids.long()  # first: of unsigned 16-bit ids, as files of tokens have them, torch knows no minimum
    if int(ids.min()) < 0:
        raise ValueError(f"{what}: negative token id {int(ids.min())}")
    return ids


def _reward(value: Any, i: int) -> float:
    try:
        return finite_number(value)
    except ValueError as error:
        raise ValueError(f"reward of response {i}: {error}") from None


def _mask(values: Any, i: int) -> Tensor:
    mask = _tensor(values, f"loss_masks of response {i}")
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"loss_masks of response {i}: values other than 0 and 1")
    return mask.bool()


def kept_tokens(group: Group) -> list[int]:
    """Return the number of tokens in the loss of each response."""
    return group.response_positions if group.loss_masks is None else [int(mask.sum()) for mask in group.loss_masks]


def same_count(name: str, values: Sequence[Any], responses: Sequence[Any]) -> None:
    if len(values) != len(responses):
        raise ValueError(f"{len(values)} {name} for {len(responses)} responses")
