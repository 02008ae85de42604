"""No public function takes more than six arguments: what travels together is one object."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 6
EXEMPT = {
    "grpo_step": "the call that users type: its keywords are the options of a step",
    "score_fresh": "prefill and score in one call, with the keywords of both",
    "sample": "the call that users type: its keywords are those of other samplers",
}


def wide(source):
    """Yield name and number of arguments of public functions with more than ``MOST``; ``self`` is not counted."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_") and node.name != "__init__":
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = sum(argument.arg not in ("self", "cls", "ctx") for argument in arguments)
        differentiable = any(argument.arg == "ctx" for argument in arguments)  # of autograd: tensors one by one
        if count > MOST and not differentiable and node.name not in EXEMPT:
            yield node.name, count


def test_public_functions_take_six_arguments_at_most():
    files = [p for folder in ("longstraw", "analysis", "hydra_plugins") for p in (ROOT / folder).rglob("*.py")]
    own = [p for p in files if "kernels" not in str(p.relative_to(ROOT)) and p.parent.name != "config"]
    assert len(own) > 80
    found = [f"{p.relative_to(ROOT)}: {name} ({count})" for p in own for name, count in wide(p.read_text())]
    assert not found


def test_a_wide_function_is_found():
    assert list(wide("class A:\n    def f(self, a, b, c, d, *, e, f, g=1): ...")) == [("f", 7)]
    assert list(wide("class A:\n    def f(self, a, b, c, d, e, f): ...\ndef _g(a, b, c, d, e, f, g): ...")) == []
