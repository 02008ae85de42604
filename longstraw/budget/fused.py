"""Bytes that the CUDA path's kernels allocate beside their results: the formulas of ``ops.*.fused``, without torch."""

from __future__ import annotations

SPLITS, SLOTS = 128, 2 * 78  # ops.attention.fused
INNER_CHUNK = 64  # ops.delta.fused
CONV_BLOCK = 64  # ops.conv.fused.BLOCK


def flash_forward_bytes(heads: int, count: int, rows: int, width: int) -> int:
    """Return what PyTorch's flash forward takes: outputs in float32 for each part that it splits the rows into."""
    blocks, most = heads * -(-count // 64), -(-rows // (256 if width <= 64 else 128 if width <= 128 else 64))
    if blocks >= 0.8 * SLOTS or not blocks:
        return 0
    parts = [n for n in range(1, min(SPLITS, SLOTS, most) + 1) if n == 1 or -(-most // n) != -(-most // (n - 1))]
    used = {n: blocks * n / (-(-blocks * n // SLOTS) * SLOTS) for n in parts}
    number = next((n for n in parts if used[n] >= 0.85 * max(used.values())), 1)
    return number * heads * count * (flash_width(width) + 1) * 4 if number > 1 else 0


def flash_backward_bytes(heads: int, repeats: int, count: int, rows: int, width: int, size: int) -> int:
    """Return what PyTorch's flash backward takes: copies, float32 sums, and each query head's gradient of the rows."""
    copies = 2 * heads * repeats * count * width * size
    sums = heads * repeats * -(-count // 128) * 128 * (flash_width(width) + 1) * 4
    expanded = 2 * heads * repeats * rows * width * size if repeats > 1 else 0
    return copies + sums + expanded


def flash_width(width: int) -> int:
    """Return the width that PyTorch's flash operators give to their sums."""
    return -(-width // 32) * 32 if width <= 128 else -(-width // 64) * 64


def delta_bytes(count: int, keys: int, values: int, key: int, value: int, size: int, *, backward: bool) -> int:
    """Return what fla's gated delta rule takes, forward or backward; ``keys``, ``values``: heads, then their widths."""
    chunks = -(-count // INNER_CHUNK)
    kept = 2 * count * keys * (key * size + 4) + count * values * (4 + (INNER_CHUNK + key + 2 * value) * size)
    kept += chunks * values * key * value * size
    if not backward:
        return kept - count * keys * 4
    summed = count * keys * key * size if keys != values else 0
    return kept + chunks * values * key * value * size + count * values * ((2 * key + value) * size + 4) + summed


def conv_bytes(count: int, channels: int, taps: int, size: int) -> int:
    """Return what fla's convolution takes in its backward."""
    blocks, weight = -(-count // CONV_BLOCK), channels * taps
    sums = blocks + (1 if size < 4 else 0)
    return count * channels * size + 2 * weight * size + sums * weight * 4 - (weight - channels) * size
