"""What fits: the limit, the largest context under it, the smallest hardware for one, and what a refused run is told."""

import re
from dataclasses import replace

import pytest

from longstraw.config import ConfigError, from_dict, option
from longstraw.memory import fit
from longstraw.memory.estimate.bound import lower_bound
from longstraw.runtime.machine_memory import MemoryLimit

GPUS = {"name": "gpus", "backend": "cuda", "gpus_per_node": 2, "gpu": "h20", "memory_gb": 0.102, "reserve_gb": 0.002}
ROOM = 100_000_000
SMALL = {"num_hidden_layers": 4, "dtype": "bfloat16"}


def configured(hardware=None, **keys):
    groups = {"model": option("model", "qwen3_6_tiny") | SMALL, "hardware": hardware or GPUS}
    lengths = {"chunk": 16384, "response_length": 64, "context": 2**17}
    return from_dict(groups | {"adapter": {"name": "lora"}, "data": {"name": "needle"}} | lengths | keys)


def peak(config, context):
    return fit.predicted(replace(config, context=context), line=True).peak


def test_what_a_device_has_is_its_memory_less_the_reserve():
    assert fit.limit_bytes(configured().hardware) == ROOM
    assert fit.limit_bytes(configured(hardware=option("hardware", "cuda")).hardware) is None


def test_what_fits_is_not_refused_and_memory_that_is_not_known_refuses_nothing():
    assert fit.too_large(configured()) is None
    assert fit.too_large(configured(context=2**24, hardware=option("hardware", "cuda"))) is None


@pytest.mark.parametrize("keys", [{}, {"prompt_grad": "exact"}])
def test_the_largest_context_fits_and_a_little_more_does_not(keys):
    config = configured(**keys)
    found = fit.largest_context(config)
    assert found.context % 64 == 0
    assert peak(config, found.context) == found.prediction.peak <= ROOM < peak(config, found.context * 1002 // 1000)


def test_no_context_fits_a_device_that_the_weights_fill():
    assert fit.largest_context(configured(hardware={**GPUS, "memory_gb": 0.003})) is None


def test_host_memory_bounds_what_lies_there():
    bounded = configured(hardware={**GPUS, "host_memory_gb": 0.2}, state={"device": "cpu"}, context=2**22)
    found = fit.largest_context(bounded)
    assert found.prediction.host * 2 <= 200e6 < found.prediction.host * 2 * 1.002
    assert f"hardware.host_memory_gb=0.2 is less; would fit: context={found.context}" in fit.too_large(bounded)


def test_a_refusal_says_the_parts_and_what_would_fit():
    config = configured(prompt_grad="exact", context=2**18)
    reason = fit.too_large(config)
    assert "\n" not in reason
    for part in ("predicted, in prompt_backward", "state_gradient ", "hardware.memory_gb=0.102", "leaves 100.0 MB"):
        assert part in reason
    longest, nodes = reason.partition("would fit: ")[2].split(" or ")
    assert int(longest.removeprefix("context=")) == fit.largest_context(config).context
    smallest = fit.smallest_hardware(config)
    assert nodes == f"hardware.nodes={smallest.nodes} ({smallest.nodes} x 2 H20)"


def test_on_the_edge_nothing_is_refused():
    need = fit.predicted(configured(prompt_grad="exact")).peak / 1e9
    for memory, refused in ((need / 1.01, False), (need / 1.02, True)):
        edge = configured(prompt_grad="exact", hardware={**GPUS, "memory_gb": memory, "reserve_gb": 0})
        assert (fit.too_large(edge) is not None) == refused


def test_a_counted_peak_is_too_large_at_once():
    config, kinds = configured(), {"retained": 90 * 10**6, "activations": 10_000_001}
    assert fit.exceeded(config, ROOM, "replay", kinds) == {}
    over = fit.exceeded(config, ROOM + 1, "replay", kinds)
    assert over["status"] == "too_large"
    assert "counted, in replay: retained 90.0 MB, activations 10.0 MB" in over["error"]
    assert "context=" not in over["error"].partition("would fit:")[2]  # the prediction says that it would


def test_memory_must_be_known_to_say_what_fits():
    with pytest.raises(ConfigError, match="memory_gb"):
        fit.largest_context(configured(hardware=option("hardware", "cuda")))


def test_a_fresh_prompt_beside_the_shared_one_is_counted_where_drift_is_measured():
    shared = configured(steps=8, refresh_every=8, measure_drift=False)
    measured = configured(steps=8, refresh_every=8)
    retained = fit.predicted(shared).by_kind["retained"]
    assert fit.predicted(measured).peak == fit.predicted(shared).peak + retained
    assert fit.predicted(measured).verb == "drift"


def test_a_machine_refuses_what_it_cannot_hold():
    cpu = option("hardware", "cpu")
    config = configured(hardware=cpu, chunk=256, context=2**20)
    said = fit.predicted(config)
    need = said.peak + said.host
    own = MemoryLimit(need, 2 * need, "the limit on virtual memory (ulimit -v)", shared=False)
    assert fit.too_large_here(config, [own], ranks=4) is None
    assert fit.too_large_here(config, [replace(own, shared=True)], ranks=1) is None
    assert fit.too_large_here(config, [replace(own, shared=True)], ranks=2) is not None
    reason = fit.too_large_here(config, [replace(own, left=need // 2)], ranks=1)
    assert "ulimit -v" in reason
    shorter = int(reason.partition("would fit: context=")[2])
    assert fit.too_large_here(replace(config, context=shorter), [replace(own, left=need // 2)], ranks=1) is None
    on_host = configured(state={"device": "cpu"}, chunk=256, context=2**20)
    least = replace(own, left=fit.predicted(on_host).host // 2)
    assert "host" in fit.too_large_here(on_host, [least], ranks=1)
    assert fit.too_large_here(on_host, [replace(least, left=need * 100)], ranks=1) is None


def test_what_parameters_and_rows_alone_exceed_is_refused_without_a_count():
    config = configured(hardware=option("hardware", "cpu"), chunk=256, context=2**16)
    least = lower_bound(config)
    assert least < fit.predicted(config).peak  # a bound below what a step holds
    limit = MemoryLimit(least // 2, least, "the machine's memory", shared=True)
    assert fit.exceeds_by_far(config, [replace(limit, left=least)], ranks=1) is None
    said = fit.exceeds_by_far(config, [limit], ranks=1)
    assert said is not None
    context = int(re.search(r"no context above (\d+) can fit", said)[1])
    assert lower_bound(replace(config, context=context)) <= limit.left * fit.MARGIN
    assert lower_bound(replace(config, context=context + 64)) > limit.left * fit.MARGIN
    assert fit.exceeds_by_far(config, [replace(limit, left=1)], ranks=1).endswith("no context can fit")
    assert fit.exceeds_by_far(config, [replace(limit, left=least)], ranks=4) is not None  # four ranks share it


@pytest.mark.parametrize("changes", [{"memory_gb": float("inf")}, {"memory_gb": -5}, {"reserve_gb": 200}])
def test_memory_that_is_no_number_of_a_card_is_refused(changes):
    with pytest.raises(ConfigError, match=r"hardware\.memory_gb="):
        configured(hardware={**GPUS, **changes})
