"""A group: what it accepts and converts, and what it refuses, with the reason."""

import math

import numpy as np
import pytest
import torch

from longstraw.group import Group

PROMPT, RESPONSES, REWARDS = [5, 6, 7], [[1], [2, 3]], [1.0, 0.0]


def make(**changes):
    return Group(**{"prompt": PROMPT, "responses": RESPONSES, "rewards": REWARDS, **changes})


def test_accepts_lists_tuples_and_tensors():
    group = make(
        prompt=(5, 6, 7), responses=[torch.tensor([1], dtype=torch.int32), [2, 3]], rewards=torch.tensor([1, 0])
    )
    assert group.prompt.dtype == torch.int64
    assert [response.tolist() for response in group.responses] == RESPONSES
    assert all(response.dtype == torch.int64 for response in group.responses)
    assert group.rewards == [1.0, 0.0]
    assert group.prompt_positions == 3
    assert group.response_positions == [1, 2]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.uint32])
def test_accepts_arrays_of_any_whole_numbers(dtype):
    group = make(prompt=np.array(PROMPT, dtype=dtype), responses=[np.array(ids, dtype=dtype) for ids in RESPONSES])
    assert (group.prompt.tolist(), [ids.tolist() for ids in group.responses]) == (PROMPT, RESPONSES)


def test_accepts_a_prompt_and_responses_of_one_token():
    assert make(prompt=[0], responses=[[0], [0]]).response_positions == [1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "prompt: no tokens"),
        ({"prompt": [[5, 6, 7]]}, r"prompt: token ids of shape \[1, 3\]"),
        ({"prompt": [1.0, 2.0]}, "prompt: token ids are torch.float32"),
        ({"prompt": [True, False]}, "prompt: token ids are torch.bool"),
        ({"prompt": [1, -100]}, "prompt: negative token id -100"),
        ({"prompt": "abc"}, "prompt: cannot become a tensor"),
        ({"prompt": [1, 2**70]}, "prompt: cannot become a tensor"),
        ({"prompt": [[1], [2, 3]]}, "prompt: cannot become a tensor"),
        ({"responses": [[1], [None]]}, "response 1: cannot become a tensor"),
        ({"rewards": [10**400, 0.0]}, "reward of response 0: 10* is no number"),
        ({"old_logprobs": [[-1.0], [-1.0, None]]}, "old_logprobs of response 1: cannot become a tensor"),
        ({"loss_masks": [[True], "ab"]}, "loss_masks of response 1: cannot become a tensor"),
        ({"responses": [[1], []]}, "response 1: no tokens"),
        ({"responses": [[1], [2, -1]]}, "response 1: negative token id -1"),
        ({"responses": [[1]], "rewards": [1.0]}, "a group of 1: .* draw more responses"),
        ({"responses": [], "rewards": []}, "a group of 0"),
        ({"rewards": [1.0]}, "1 rewards for 2 responses"),
        ({"rewards": [1.0, 0.0, 0.0]}, "3 rewards for 2 responses"),
        ({"rewards": [1.0, math.nan]}, "reward of response 1: nan, must be finite"),
        ({"rewards": [-math.inf, 0.0]}, "reward of response 0: -inf, must be finite"),
        ({"rewards": ["high", 0.0]}, "reward of response 0: 'high' is no number"),
        ({"rewards": [None, 0.0]}, "reward of response 0: None is no number"),
        ({"old_logprobs": [[-1.0]]}, "1 old_logprobs for 2 responses"),
        ({"old_logprobs": [[-1.0], [-1.0]]}, r"old_logprobs of response 1: shape \[1\] for 2 tokens"),
        ({"old_logprobs": [[-1.0], [-1.0, math.nan]]}, "old_logprobs of response 1: nan at token 1, must be finite"),
        ({"old_logprobs": [[-1.0], [-math.inf, -1.0]]}, "old_logprobs of response 1: -inf at token 0"),
        ({"old_logprobs": [[-1], [-1.0, -1.0]]}, "old_logprobs of response 0: torch.int64"),
        ({"loss_masks": [[True]]}, "1 loss_masks for 2 responses"),
        ({"loss_masks": [[True, True], [True, True]]}, r"loss_masks of response 0: shape \[2\] for 1 tokens"),
        ({"loss_masks": [[1], [1, 2]]}, "loss_masks of response 1: values other than 0 and 1"),
    ],
)
def test_refuses_with_the_reason(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_masked_old_logprobs_may_be_anything():
    group = make(old_logprobs=[[-1.0], [-1.0, math.nan]], loss_masks=[[1], [1, 0]])
    assert group.loss_masks[1].tolist() == [True, False]


def test_to_moves_the_prompt_and_leaves_the_original():
    group = make(old_logprobs=[[-1.0], [-1.0, -2.0]], loss_masks=[[1], [1, 0]], id="a")
    moved = group.to("meta")
    assert moved.prompt.device.type == "meta"
    tensors = [*moved.responses, *moved.old_logprobs, *moved.loss_masks]  # they wait on the host for their turn
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert (moved.rewards, moved.id) == (group.rewards, "a")
    assert group.prompt.device.type == "cpu"
    assert make().to("meta").loss_masks is None
