"""Two steps of the optimizer change the parameters of a model over ranks as they change those of one process."""

import pytest
import torch
from cases import Case, build, changes, groups, relative, request, step

from longstraw.config import OptimizerConfig

CONFIG = OptimizerConfig(name="adamw", lr=1e-3, weight_decay=0.1, max_grad_norm=0.5)
CASES = {
    "qwen": (2, Case(groups=((130, (5, 3)),))),
    "glm, prompts side by side, experts on two": (4, Case("glm", groups=((66, (5, 3)), (65, (3, 4))), dp=2, ep=2)),
    "adapters": (2, Case(groups=((130, (5, 3)),), adapter=("q_proj", "out_proj", "down_proj"))),
}


def alone(case):
    model = build(case)

    def loss():
        losses = [step(case, model, group).loss for group in groups(case)]
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(losses)
        return torch.stack(losses).mean()

    return changes(model, CONFIG, 2, None, loss)


@pytest.mark.parametrize("name", CASES)
def test_two_steps_change_what_they_change_on_one_rank(ranks, name):
    world, case = CASES[name]
    target, norms = alone(case)
    assert min(norms) > CONFIG.max_grad_norm  # clipped
    moved = {name for name, change in target.items() if change.abs().max() > 0}
    assert moved == {name for name, p in build(case).named_parameters() if p.requires_grad}
    for change, its_norms in ranks(world).run(request(case, "updates", config=CONFIG, steps=2)):
        assert its_norms == pytest.approx(norms, rel=1e-10)
        assert change.keys() == target.keys()
        assert max(relative(change[name], target[name]) for name in target) < 1e-10


def test_another_norm_would_show(ranks):
    """The comparison above sees a clipping by one rank's norm instead of all ranks'."""
    world, case = CASES["qwen"]
    target, _ = alone(case)
    request_ = request(case, "updates", config=OptimizerConfig(**{**vars(CONFIG), "max_grad_norm": None}), steps=2)
    change, _ = ranks(world).run(request_)[0]
    assert max(relative(change[name], target[name]) for name in target) > 1e-6
