"""A model that no rank ever holds whole has the weights that one process would have."""

import pytest
import torch
from building import Building

from longstraw.config import AdapterConfig, load_model_config
from longstraw.models import build_model, load_model
from longstraw.models.hf_save import save_model
from longstraw.models.lora import add_adapter, save_adapter

CASES = [
    ("qwen3_6_tiny", "none"),
    ("qwen3_6_tiny", "lora"),
    ("glm_5_2_tiny", "lora"),
    ("qwen3_6_moe_tiny", "none"),
    ("llama_tiny", "none"),
    ("llama_tiny", "lora"),
]


def alone(config, adapter, seed=3):
    model = (
        build_model(config, seed=seed) if config.checkpoint is None else load_model(config.checkpoint, config=config)
    )
    return dict(add_adapter(model, adapter, seed=seed).state_dict())


@pytest.mark.parametrize(("name", "adapter"), CASES)
@pytest.mark.parametrize("stored", [False, True])
def test_weights_are_those_of_one_process(ranks, tmp_path, name, adapter, stored):
    config = load_model_config(name)
    given = AdapterConfig(name=adapter)
    if stored:
        model = build_model(config, seed=5)
        save_model(model, tmp_path / "model")
        config.checkpoint = str(tmp_path / "model")
        if adapter == "lora":
            save_adapter(add_adapter(model, given, seed=6), tmp_path / "adapter")
            given.checkpoint = str(tmp_path / "adapter")
    target = alone(config, given)
    for answer in ranks(2).run(Building(config, given)):
        assert answer["weights"].keys() == target.keys()
        assert all(torch.equal(answer["weights"][key], value) for key, value in target.items())
        assert answer["held"] < 0.6 * sum(x.numel() for x in target.values())
    other = alone(config, given, seed=4)
    assert stored or not all(torch.equal(other[key], value) for key, value in target.items())
