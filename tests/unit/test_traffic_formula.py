"""Bytes sent by the published models, against numbers worked out by hand; ``test_rank_traffic`` has counts."""

import pytest
from traffic_formula import bytes_sent

from longstraw.config import AdapterConfig, DataConfig, HardwareConfig, RunConfig, load_model_config
from longstraw.parallel.parallel_dims import resolve_dims

CHUNK, RESPONSE = 16384, 8192


def sent(model, ranks, chunks, **options):
    hardware = HardwareConfig(name="test", ranks=ranks)
    run = RunConfig(
        model=load_model_config(model),
        hardware=hardware,
        adapter=AdapterConfig(name="lora", rank=16, alpha=32),
        data=DataConfig(name="jsonl"),
        context=chunks * CHUNK + 1 + RESPONSE,
        response_length=RESPONSE,
        chunk=CHUNK,
        **options,
    )
    prompt = chunks * CHUNK + 1
    return bytes_sent(
        run, resolve_dims(run.model, hardware), prompt_positions=prompt, response_positions=[RESPONSE] * 2
    )


def test_one_rank_sends_nothing():
    assert sent("qwen3_6_27b", 1, 2, prompt_grad="exact") == {}


@pytest.mark.parametrize("ranks", [8, 16])
def test_qwen_by_hand(ranks):
    """16 attention layers of 24 heads of 256, of which the last adds only rows; 48 delta layers of 16 and 48 of 128."""
    bytes_of, others, piece = sent("qwen3_6_27b", ranks, 3), ranks - 1, CHUNK // ranks
    queries = others * piece * 24 * 256 * 2
    sums = others * CHUNK * 24 * 4
    assert bytes_of["prefill", "all_gather", "attention"] == 3 * 15 * (queries + sums)
    assert bytes_of["prefill", "reduce_scatter", "attention"] == 3 * 15 * 2 * queries  # in float32
    columns = 2 * 16 * 128 + 2 * 48 * 128 + 2 * 48
    assert bytes_of["prefill", "all_to_all", "heads"] == 3 * 48 * piece * columns * 2 * others // ranks


@pytest.mark.parametrize("ranks", [8, 32])
def test_glm_by_hand(ranks):
    """78 layers of 64 heads that read 512 + 64 values, of which the last adds only rows; the first three are dense."""
    bytes_of, others, piece = sent("glm_5_2", ranks, 2), ranks - 1, CHUNK // ranks
    sums = others * CHUNK * 64 * 4
    assert bytes_of["prefill", "all_gather", "attention"] == 2 * 77 * (others * piece * 64 * 576 * 2 + sums)
    assert bytes_of["prefill", "reduce_scatter", "attention"] == 2 * 77 * others * piece * 64 * 512 * 4
    token = 8 * (2 * 6144 * 2 + 4)  # to eight experts and back, with a weight
    told = 8 * 256
    assert bytes_of["prefill", "all_to_all", "experts"] == 2 * 74 * (piece * token + told) * others // ranks


def test_a_prompt_twice_as_long_sends_twice_as_much_in_its_prefill():
    """What is chosen among, and what scans carry on, travels with the chunk and not with the prompt."""
    for model in ("qwen3_6_27b", "glm_5_2"):
        short, long = (sent(model, 8, chunks) for chunks in (2, 4))
        for key, size in short.items():
            assert long[key] == size * (2 if key[0] == "prefill" else 1)
