"""The table of what fits where, and what its command line refuses."""

import pytest

from longstraw import build_model, plan
from longstraw.models.hf_save import save_model
from longstraw.simulation.simulate import simulate


def test_every_way_to_train_has_a_row():
    configs = list(plan.cases({}))
    assert len(configs) == 24
    rows = {(c.prompt_grad, c.adapter.name, c.optimizer.name, c.state.gradient_dtype, c.state.device) for c in configs}
    assert len(rows) == 24
    assert all(c.steps == 2 and c.hardware.name == "h20x8" for c in configs)  # AdamW has its state
    assert not any(c.prompt_grad == "detached" and c.state.gradient_dtype == "bfloat16" for c in configs)


def test_a_given_key_holds_in_every_row():
    typed = plan.parse(
        ["prompt_grad=exact", "adapter=lora", "model.num_hidden_layers=8", "context=1Mi", "state.device=null"]
    )
    configs = list(plan.cases(typed))
    assert {(c.prompt_grad, c.adapter.name, c.model.num_hidden_layers, c.context) for c in configs} == {
        ("exact", "lora", 8, 2**20)
    }
    assert len(configs) == 4


def test_sizes_are_those_of_a_checkpoint(tmp_path, capsys):
    model = build_model("qwen3_6_tiny", num_hidden_layers=4, hidden_size=96)
    save_model(model, tmp_path / "mine")
    words = ["model=qwen3_6_tiny", f"model.checkpoint={tmp_path / 'mine'}"]
    config = next(plan.cases(plan.parse(words)))
    assert (config.model.name, config.model.num_hidden_layers, config.model.hidden_size) == ("mine", 4, 96)
    small = [*words, "hardware=cpu", "adapter=none", "context=256", "chunk=64"]
    (simulated,) = simulate(next(plan.cases(plan.parse(small))))
    assert simulated["parameters"] == sum(p.numel() for p in model.parameters())
    cut = next(plan.cases(plan.parse([*words, "model.num_hidden_layers=2"])))
    assert (cut.model.num_hidden_layers, cut.model.hidden_size) == (2, 96)
    assert next(plan.cases(plan.parse(words[:1]))).model.hidden_size == 64
    assert plan.main([words[0], "model.checkpoint=/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("longstraw.plan: /nowhere/config.json: not there")


@pytest.mark.parametrize("how", ["--config-dir={}", "hydra.searchpath=[file://{}]"])
def test_a_users_own_option_files_are_found(tmp_path, capsys, how):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [qwen3_6_tiny]\nname: mine\nnum_hidden_layers: 4\n")
    words = ["model=mine", "hardware=cpu", "adapter=none", "optimizer=none", "prompt_grad=detached", "chunk=64"]
    try:
        assert plan.main([how.format(tmp_path), *words]) == 2  # as far as the memory, which is not given
        assert "hardware=cpu has no memory_gb" in capsys.readouterr().err
        assert plan.compose(plan.parse(words)).model.num_hidden_layers == 4
    finally:
        assert plan.main([*words]) == 2
    assert "model='mine' is not one of" in capsys.readouterr().err


SMALL = ["model=qwen3_6_tiny", "model.num_hidden_layers=4"]
SMALL += ["model.dtype=bfloat16", "chunk=16384", "hardware.gpus_per_node=2"]


def test_the_table_names_contexts_and_the_smallest_hardware(capsys):
    memory = ["hardware.memory_gb=0.1", "hardware.reserve_gb=0", "context=524288"]
    assert plan.main([*SMALL, *memory, "adapter=lora", "optimizer=adamw", "state.device=null"]) == 0
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if "lora" in line]
    assert [line.split("│")[1].strip() for line in lines] == ["detached", "exact", "exact"]
    smallest = [line.split("│")[-2].strip() for line in lines]
    assert "100.0 MB a device" in said
    contexts = [int(line.split("│")[6].replace(",", "")) for line in lines]
    assert contexts[1] < contexts[2] < contexts[0]
    assert all(
        (hardware in ("1 x 1 H20", "1 x 2 H20")) == (found >= 524288)
        for hardware, found in zip(smallest, contexts, strict=True)
    )


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("promt_grad=exact", "did you mean prompt_grad"),
        ("hardware=h20", "did you mean h20x8"),
        ("context=two", "not a count"),
        ("context", "write key=value"),
        ("mode=run", "a plan is of no mode"),
        ("hardware=cpu", "give hardware.memory_gb=NUMBER"),
        ("prompt_grad=both", "detached, exact"),
    ],
)
def test_a_mistake_is_one_line(argument, said, capsys):
    assert plan.main([argument]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_help_is_the_page(capsys):
    assert plan.main(["--help"]) == 0
    assert "largest context" in capsys.readouterr().out
