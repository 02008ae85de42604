"""How ranks share a model: what works, and what is refused with the choices that work."""

import pytest

from longstraw.config import ConfigError, HardwareConfig
from longstraw.models import build_model
from longstraw.parallel.parallel_dims import ParallelDims, resolve_dims


def sizes(model, hardware, **overrides):
    return resolve_dims(build_model(model, device="meta", **overrides).config, HardwareConfig(name="test", **hardware))


@pytest.mark.parametrize(
    ("model", "hardware", "wanted"),
    [
        ("qwen3_6_tiny", {}, (1, 1, 1)),
        ("qwen3_6_tiny", {"ranks": 4}, (1, 4, 1)),
        ("qwen3_6_tiny", {"ranks": 8, "dp": 2}, (2, 4, 1)),
        ("qwen3_6_tiny", {"ranks": 3, "dp": 3}, (3, 1, 1)),
        ("qwen3_6_27b", {"nodes": 2, "gpus_per_node": 8}, (1, 16, 1)),
        ("qwen3_6_27b", {"nodes": 4, "gpus_per_node": 8, "dp": 2}, (2, 16, 1)),
        ("glm_5_2_tiny", {"ranks": 4}, (1, 4, 4)),
        ("qwen3_6_moe_tiny", {"ranks": 4}, (1, 4, 4)),
        ("glm_5_2_tiny", {"ranks": 4, "dp": 2, "ep": 2}, (2, 2, 2)),
        ("glm_5_2_tiny", {"ranks": 3}, (1, 3, 1)),
        ("glm_5_2_tiny", {"ranks": 6}, (1, 6, 2)),
        ("glm_5_2", {"nodes": 4, "gpus_per_node": 8}, (1, 32, 32)),
    ],
)
def test_ranks_are_laid_out(model, hardware, wanted):
    found = sizes(model, hardware)
    assert found == ParallelDims(*wanted)
    assert found.world == HardwareConfig(name="test", **hardware).world_size


@pytest.mark.parametrize(
    ("model", "hardware", "overrides", "words"),
    [
        ("qwen3_6_tiny", {"ranks": 4, "nodes": 2, "gpus_per_node": 8}, {}, "leave hardware.ranks out"),
        ("qwen3_6_tiny", {"ranks": 3, "nodes": 2}, {}, "does not divide over hardware.nodes=2"),
        ("qwen3_6_tiny", {"ranks": 4, "dp": 3}, {}, "one of hardware.dp=1, 2, 4$"),
        ("qwen3_6_tiny", {"ranks": 8}, {}, "must divide 4; with 8 ranks: hardware.dp=2, hardware.dp=4, hardware.dp=8$"),
        ("qwen3_6_27b", {"nodes": 4, "gpus_per_node": 8}, {}, "16 key heads .*: hardware.dp=2, hardware.dp=4,"),
        ("qwen3_6_tiny", {"ranks": 4, "ep": 2}, {}, "the 1 experts of qwen3_6_tiny; one of 1$"),
        ("glm_5_2_tiny", {"ranks": 4, "ep": 3}, {}, "the 4 ranks and the 8 experts of glm_5_2_tiny; one of 1, 2, 4$"),
        ("glm_5_2_tiny", {"ranks": 6, "ep": 3}, {}, "one of 1, 2$"),
        ("glm_5_2_tiny", {"ranks": 4}, {"vocab_size": 5}, "some would hold none; with 4 ranks: .*dp=2, hardware.dp=4$"),
    ],
)
def test_wrong_layouts_name_the_ones_that_work(model, hardware, overrides, words):
    with pytest.raises(ConfigError, match=words):
        sizes(model, hardware, **overrides)


def test_what_is_named_works():
    for dp in (2, 4, 8):
        assert sizes("qwen3_6_tiny", {"ranks": 8, "dp": dp}).dp == dp
    for ep in (1, 2):
        assert sizes("glm_5_2_tiny", {"ranks": 6, "ep": ep}).ep == ep
    for dp in (2, 4):
        assert sizes("glm_5_2_tiny", {"ranks": 4, "dp": dp}, vocab_size=5).dp == dp
