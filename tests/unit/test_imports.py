"""Who may import whom, held by walking the imports: layers, doorways, and what must do without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LAYERS = [  # a module imports from its own layer or a lower one, never from a higher
    {"longstraw", "units", "config", "model_config", "hardware_config", "failures", "kinds", "workspace", "settings"},
    {"grpo", "ops"},
    {"state"},
    {"layers"},
    {"models"},
    {"parallel"},
    {"budget", "memory", "fit"},
    {"step", "sample", "selfcheck", "stepped"},
    {"schema", "provenance", "place", "progress", "slurm", "stop", "lines"},
    {"record", "data", "checkpoint"},
    {"observe", "resume", "optimize", "together", "table"},
    {"trainer"},
    {"played"},
    {"simulate", "emulate"},
    {"train"},
    {"job", "watch", "submit", "logs"},
    {"launch"},
    {"run", "overrides", "audit", "status", "plan"},
]

OPS = ("attention", "delta", "conv", "latent", "logprob", "moe")
DOORWAYS = {  # the modules, or packages with all they hold, in which a dependency may be imported
    "hydra": {"longstraw.run", "hydra_plugins"},
    "omegaconf": {
        "longstraw.config",
        "longstraw.config.hardware",
        "longstraw.config.model",
        "longstraw.config.overrides",
        "longstraw.run",
        "hydra_plugins",
    },
    "submitit": {"longstraw.launch.executors"},
    "wandb": {"longstraw.tracking.recorder", "analysis"},
    "safetensors": {"longstraw.models.hf_weights"},
    "transformers": {"longstraw.models.hf_weights", "longstraw.data.tokenizer"},
    "peft": {"longstraw.models.lora"},
    "triton": {f"longstraw.ops.{op}.kernels" for op in OPS},
    "fla": {f"longstraw.ops.{op}.kernels" for op in OPS},
    "torch.distributed": {
        "longstraw.parallel",
        "longstraw.launch.jobs",
        "longstraw.training.checkpoint",
        "longstraw.simulation.single_rank",
    },
    "pandas": {"analysis"},
    "matplotlib": {"analysis"},
    "trl": set(),
}
WITHOUT_TORCH = {
    "longstraw.units",
    "longstraw.config",
    "longstraw.config.hardware",
    "longstraw.config.model",
    "longstraw.memory.kinds",
    "longstraw.ops.kernel_workspace",
    "longstraw.config.settings",
    "longstraw.memory.estimate",
    "longstraw.memory.fit",
    "longstraw.plan",
    "analysis",
}


def imports(source, package):
    """Yield the full names that ``source`` of ``package`` imports, in functions too, except for type checking."""
    tree = ast.parse(source)
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(id(x) for x in ast.walk(node))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            origin = ".".join(x for x in (base, node.module) if x)
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (x.value for x in node.args[:1] if isinstance(x, ast.Constant))


def modules():
    """Yield name, containing package and source of every module of the project."""
    for folder in ("longstraw", "analysis", "hydra_plugins"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            yield name, name if is_package else name.rpartition(".")[0], path.read_text()


def within(name, package):
    return name == package or name.startswith(package + ".")


def layer(name):
    """Return the layer of a module of ours, or None: what is not in the table has none."""
    part = name.split(".")[1] if name.startswith("longstraw.") else name
    return next((i for i, names in enumerate(LAYERS) if part in names), None)


def violations(name, package, source):
    """Yield what one module imports against the rules."""
    for target in imports(source, package):
        for dependency, doors in DOORWAYS.items():
            if within(target, dependency) and not any(within(name, door) for door in doors):
                yield f"{name} imports {target}; {dependency} may be imported in {sorted(doors) or 'tests'} only"
        if within(target, "torch") and any(within(name, light) for light in WITHOUT_TORCH):
            yield f"{name} imports {target}, but must do without torch"
        if not within(target, "longstraw") or not within(name, "longstraw"):
            continue
        mine, other = layer(name), layer(target)
        if mine is not None and other is not None and other > mine:
            yield f"{name} (layer {mine}) imports {target} (layer {other})"


ALL = {name: (package, source) for name, package, source in modules()}


@pytest.mark.parametrize("name", ALL)
def test_imports_go_downwards_and_through_doorways(name):
    assert not list(violations(name, *ALL[name]))


def test_every_module_has_a_layer():
    missing = [name for name in ALL if within(name, "longstraw") and layer(name) is None]
    assert not missing, "give these a layer in LAYERS"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("longstraw.state", "from longstraw.step import prefill"),
        ("longstraw.state", "from longstraw import step"),
        ("longstraw.models.decoder", "import longstraw.parallel.mesh"),
        ("longstraw.models.decoder", "from ..parallel import mesh"),
        ("longstraw.ops.delta.reference", "def f():\n    from longstraw.layers.delta import GatedDeltaNet"),
        ("longstraw.step", "import wandb"),
        ("longstraw.step", "def f():\n    import wandb.sdk"),
        ("longstraw.step", "import importlib\nimportlib.import_module('transformers')"),
        ("longstraw.layers.attention", "from torch import distributed"),
        ("longstraw.layers.attention", "import torch.distributed as dist"),
        ("longstraw.launch.jobs", "import hydra"),
        ("longstraw.units", "import torch"),
        ("longstraw.tracking.recorder", "from longstraw.training.loop import run_job"),
        ("analysis.capacity", "from torch import Tensor"),
    ],
)
def test_rules_can_fail(name, source):
    assert list(violations(name, name.rpartition(".")[0], source))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("longstraw.step", "from longstraw.state import RetainedState\nimport torch"),
        (
            "longstraw.state",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from longstraw.step import Retained",
        ),
        ("longstraw.launch.executors", "import submitit"),
        ("longstraw.training.checkpoint", "import torch.distributed"),
        ("analysis.runs", "import pandas, wandb\nfrom longstraw.units import format_bytes"),
    ],
)
def test_rules_let_pass(name, source):
    assert not list(violations(name, name.rpartition(".")[0], source))


def python(*lines):
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


BLOCK = "import sys; sys.modules['torch'] = None"


def test_light_modules_import_with_torch_blocked():
    names = sorted(name for name in ALL if any(within(name, light) for light in WITHOUT_TORCH))
    done = python(BLOCK, f"import importlib; [importlib.import_module(name) for name in {names}]", "import longstraw")
    assert done.returncode == 0, done.stderr


def test_blocking_torch_blocks_it():
    done = python(BLOCK, "import longstraw.step")
    assert done.returncode != 0
    assert "torch" in done.stderr


def test_names_of_the_library_are_offered():
    done = python(
        "import longstraw, sys",
        "assert 'torch' not in sys.modules",
        "assert all(getattr(longstraw, name) for name in longstraw.__all__)",
        "assert set(longstraw.__all__) <= set(dir(longstraw))",
        "longstraw.grpo_stepp",
    )
    assert done.returncode != 0
    assert "it offers Group, build_model, grpo_step, load_model" in done.stderr
