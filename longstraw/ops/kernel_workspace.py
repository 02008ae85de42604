"""Formulas for the bytes that the CUDA kernels allocate besides their results. No torch.

The operators in ``ops.*.fused`` allocate as much through ``fake_workspace`` on fake tensors, and ``memory.estimate``
uses the formulas for predictions.
"""

from __future__ import annotations

from longstraw.config.model import INNER_CHUNK

SPLITS = 128  # parts of the rows that PyTorch's flash forward makes at most
SLOTS = 2 * 78  # programs that it assumes to run at once: two on each multiprocessor of an H20
CONV_BLOCK = 64  # positions of which fla's convolution sums the gradient of the weight first


def flash_forward_bytes(heads: int, count: int, rows: int, width: int) -> int:
    """Return what PyTorch's flash forward allocates beside its results: nothing where queries alone fill a GPU.

    Otherwise rows are split, and each part has an output and a log-sum-exp in float32. The number of parts is the
    smallest whose use of the GPU is close to the best.
    """
    blocks, most = heads * -(-count // 64), -(-rows // (256 if width <= 64 else 128 if width <= 128 else 64))
    if blocks >= 0.8 * SLOTS or not blocks:
        return 0
    parts = [n for n in range(1, min(SPLITS, SLOTS, most) + 1) if n == 1 or -(-most // n) != -(-most // (n - 1))]
    used = {n: blocks * n / (-(-blocks * n // SLOTS) * SLOTS) for n in parts}
    number = next((n for n in parts if used[n] >= 0.85 * max(used.values())), 1)
    return number * heads * count * (_flash_width(width) + 1) * 4 if number > 1 else 0


def flash_backward_bytes(heads: int, repeats: int, count: int, rows: int, width: int, size: int) -> int:
    """Return what PyTorch's flash backward allocates beside its results.

    Contiguous copies of the output and its gradient, the float32 accumulator of the query gradient and the row sums
    (both rounded up), and, with grouped queries, a key and a value gradient for every query head.
    """
    copies = 2 * heads * repeats * count * width * size
    sums = heads * repeats * -(-count // 128) * 128 * (_flash_width(width) + 1) * 4
    expanded = 2 * heads * repeats * rows * width * size if repeats > 1 else 0
    return copies + sums + expanded


def _flash_width(width: int) -> int:
    """Return the width that PyTorch's flash operators give to their sums."""
    return -(-width // 32) * 32 if width <= 128 else -(-width // 64) * 64


def delta_forward_bytes(count: int, keys: int, values: int, key: int, value: int, size: int) -> int:
    """Return what fla's gated delta rule allocates beside its results: all is alive when the outputs are made.

    ``keys`` and ``values`` are heads, ``key`` and ``value`` their widths.
    """
    return _delta_kept(count, keys, values, key, value, size) - count * keys * 4  # the queries' norms are gone by then


def delta_backward_bytes(count: int, keys: int, values: int, key: int, value: int, size: int) -> int:
    """Return what is alive beside the results at its backward's peak: where the gradients of w and u are taken up."""
    states = -(-count // INNER_CHUNK) * values * key * value * size
    rows = count * values * ((2 * key + value) * size + 4)
    summed = count * keys * key * size if keys != values else 0
    return _delta_kept(count, keys, values, key, value, size) + states + rows + summed


def _delta_kept(count: int, keys: int, values: int, key: int, value: int, size: int) -> int:
    """Normed queries and keys with their norms, summed decay, inverse, w, u, new values, and the chunks' states."""
    normed = 2 * count * keys * (key * size + 4)
    rows = count * values * (4 + (INNER_CHUNK + key + 2 * value) * size)
    return normed + rows + -(-count // INNER_CHUNK) * values * key * value * size


def conv_forward_bytes(channels: int, taps: int, size: int) -> int:
    """Return the bytes that the forward allocates besides its results: the tail in fla's form, of ``taps`` columns."""
    return channels * taps * size


def conv_backward_bytes(count: int, channels: int, taps: int, size: int) -> int:
    """Return what is alive beside the results at the backward's peak: where the weight's gradient is summed.

    The output before SiLU, both tails, the weight's gradient by blocks and its sum in float32 (which is the result
    where that has float32). The gradient of the tail is made later.
    """
    sums = -(-count // CONV_BLOCK) + (1 if size < 4 else 0)
    later = channels * (taps - 1) * size
    tails = 2 * conv_forward_bytes(channels, taps, size)
    return count * channels * size + tails + sums * channels * taps * 4 - later
