"""What fits: the limit, the largest context under it, the smallest hardware for one, and what a refused run is told."""

import pytest

from longstraw.config import ConfigError, from_dict, option
from longstraw.memory import fit
from longstraw.memory.estimate import predict

H20 = option("hardware", "h20x8")


def configured(model="qwen3_6_27b", hardware=None, **keys):
    groups = {"model": option("model", model), "hardware": hardware or H20, "adapter": {"name": "lora"}}
    return from_dict(groups | {"data": {"name": "needle"}, "context": 2**21} | keys)


def peak(config, context):
    said = predict(config, prompt_positions=context - config.response_length, response_positions=config.response_length)
    return said.peak


def test_what_a_device_has_is_its_memory_less_the_reserve():
    assert fit.limit_bytes(configured().hardware) == 99_600_000_000
    assert fit.limit_bytes(configured(hardware=option("hardware", "cuda")).hardware) is None


def test_the_paper_s_case_fits_and_memory_that_is_not_known_refuses_nothing():
    assert fit.too_large(configured()) is None
    assert fit.too_large(configured(context=2**24, hardware=option("hardware", "cuda"))) is None


@pytest.mark.parametrize("keys", [{}, {"prompt_grad": "exact"}, {"adapter": {"name": "none"}}])
def test_the_largest_context_fits_and_a_little_more_does_not(keys):
    config = configured(**keys)
    found = fit.largest_context(config)
    assert found.context % 64 == 0
    assert peak(config, found.context) == found.prediction.peak <= 99_600_000_000
    assert peak(config, found.context * 1002 // 1000) > 99_600_000_000


def test_no_context_fits_a_device_that_the_weights_fill():
    assert fit.largest_context(configured(hardware={**H20, "memory_gb": 8})) is None


def test_host_memory_bounds_what_lies_there():
    bounded = configured(hardware={**H20, "host_memory_gb": 2000}, state={"device": "cpu"})
    found = fit.largest_context(bounded)
    assert found.prediction.host * 8 <= 2000e9 < found.prediction.host * 8 * 1.002
    assert fit.largest_context(configured(state={"device": "cpu"})).context == fit.LONGEST


def test_a_refusal_says_the_parts_and_what_would_fit():
    reason = fit.too_large(configured(prompt_grad="exact", context=2**22))
    assert "\n" not in reason
    for part in ("predicted, in prompt_backward", "state_gradient 68.", "hardware.memory_gb=102.6", "leaves 99.600 GB"):
        assert part in reason
    longest, nodes = reason.partition("would fit: ")[2].split(" or ")
    assert int(longest.removeprefix("context=")) == fit.largest_context(configured(prompt_grad="exact")).context
    assert nodes == "hardware.nodes=2 (2 x 8 H20)"


def test_on_the_edge_nothing_is_refused():
    config = configured(prompt_grad="exact")
    need = peak(config, config.context) / 1e9
    for memory, refused in ((need / 1.01, False), (need / 1.02, True)):
        edge = configured(prompt_grad="exact", hardware={**H20, "memory_gb": memory, "reserve_gb": 0})
        assert (fit.too_large(edge) is not None) == refused


def test_a_counted_peak_is_too_large_at_once():
    config, kinds = configured(), {"retained": 90 * 10**9, "activations": 9_600_000_001}
    assert fit.exceeded(config, 99_600_000_000, "replay", kinds) == {}
    over = fit.exceeded(config, 99_600_000_001, "replay", kinds)
    assert over["status"] == "too_large"
    assert "counted, in replay: retained 90.000 GB, activations 9.600 GB" in over["error"]


def test_the_smallest_hardware():
    assert fit.smallest_hardware(configured()).nodes == 2  # more than there are
    assert fit.smallest_hardware(configured(), from_one=True).gpus_per_node == 4
    assert fit.smallest_hardware(configured(prompt_grad="exact", context=2**24)) is None  # sixteen ranks at most
    with pytest.raises(ConfigError, match="memory_gb"):
        fit.largest_context(configured(hardware=option("hardware", "cuda")))


@pytest.mark.parametrize("response", [1, 16, 31, 63])
def test_a_short_response_has_a_largest_context_too(response):
    config = configured(response_length=response, context=64 + response)
    found = fit.largest_context(config)
    assert peak(config, found.context) <= 99_600_000_000 < peak(config, found.context * 1002 // 1000)


def test_a_fresh_prompt_beside_the_shared_one_is_counted_where_drift_is_measured():
    shared = configured(context=2**23, steps=8, refresh_every=8, measure_drift=False)
    assert fit.too_large(shared) is None
    measured = configured(context=2**23, steps=8, refresh_every=8)
    assert "in drift: retained" in fit.too_large(measured)
    retained = fit.predicted(shared).by_kind["retained"]
    assert fit.predicted(measured).peak == fit.predicted(shared).peak + retained


def test_what_would_fit_is_less_than_what_did_not():
    config = configured(context=10_854_400)
    text = fit.exceeded(config, 99_700_000_000, "replay", {"retained": 90_000_000_000})["error"]
    assert "context=" not in text.partition("would fit:")[2]
    assert "hardware.nodes=2" in text


@pytest.mark.parametrize("changes", [{"memory_gb": float("inf")}, {"memory_gb": -5}, {"reserve_gb": 200}])
def test_memory_that_is_no_number_of_a_card_is_refused(changes):
    with pytest.raises(ConfigError, match=r"hardware\.memory_gb="):
        configured(hardware={**H20, **changes})
