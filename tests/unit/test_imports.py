"""Who may import whom, held by walking the imports: layers, doorways, and what must do without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FLOORS = [  # a module imports from its own floor or a lower one; the longest name that fits decides
    {"longstraw", "longstraw.units", "longstraw.errors", "longstraw.config"},
    {"longstraw.ops"},
    {"longstraw.group", "longstraw.observer"},
    {
        "longstraw.grpo",
        "longstraw.state",
        "longstraw.memory",
        "longstraw.timing",
        "longstraw.runtime",
        "longstraw.tracking",
    },
    {"longstraw.layers", "longstraw.data"},
    {"longstraw.models"},
    {"longstraw.step", "longstraw.rollout", "longstraw.parallel", "longstraw.selfcheck", "longstraw.fetch"},
    {"longstraw.memory.estimate", "longstraw.timing.meter"},
    {
        "longstraw.tracking.constants",
        "longstraw.tracking.recorder",
        "longstraw.tracking.run_folder",
        "longstraw.tracking.job_table",
    },
    {"longstraw.training", "longstraw.timing.estimate"},
    {"longstraw.simulation"},
    {"longstraw.memory.estimate.cut"},  # counts a simulated step
    {"longstraw.memory.fit"},
    {"longstraw.training.loop", "longstraw.simulation.jobs"},
    {"longstraw.launch"},
    {"longstraw.plan", "longstraw.audit", "longstraw.status", "hydra_plugins"},
    {"longstraw.run"},
    {"longstraw.evaluate"},  # makes a folder of runs as run does
    {"longstraw.__main__"},
]

OPS = ("attention", "delta", "conv", "latent", "logprob")
DOORWAYS = {  # the modules, or packages with all they hold, in which a dependency may be imported
    "hydra": {"longstraw.run", "hydra_plugins"},
    "omegaconf": {"longstraw.config", "longstraw.run", "hydra_plugins"},
    "submitit": {"longstraw.launch.executors"},
    "wandb": {"longstraw.tracking.wandb_mirror", "analysis"},
    "safetensors": {"longstraw.models.hf_weights"},
    "transformers": {"longstraw.models.gguf", "longstraw.data.tokenizer"},
    "peft": {"longstraw.models.lora"},
    "triton": {f"longstraw.ops.{op}.kernels" for op in OPS},
    "fla": {f"longstraw.ops.{op}.kernels" for op in OPS},
    "torch.distributed": {
        "longstraw.parallel",
        "longstraw.timing.meter",
        "longstraw.runtime",
        "longstraw.training.checkpoint",
        "longstraw.simulation",
    },
    "pandas": {"analysis"},
    "matplotlib": {"analysis"},
    "httpx": {"longstraw.rollout.client"},
    "pyarrow": {"longstraw.data.rollouts.tables"},
    "trl": set(),
}
WITHOUT_TORCH = {
    "longstraw.units",
    "longstraw.errors",
    "longstraw.config",
    "longstraw.tracking",
    "longstraw.memory.kinds",
    "longstraw.runtime.process_info",
    "longstraw.runtime.failure_files",
    "longstraw.runtime.whole_files",
    "longstraw.launch.placement",
    "longstraw.launch.spec",
    "analysis",
}


def imports(source, package):
    """Yield the full names that ``source`` of ``package`` imports, in functions and for type checking too."""
    for node in ast.walk(ast.parse(source)):
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


def floor(name):
    """Return the floor of a module or a name in one, or None: what is not in the table has none."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        for i, names in enumerate(FLOORS):
            if ".".join(parts[:end]) in names and (end > 1 or len(parts) == 1 or parts[0] != "longstraw"):
                return i
    return None


def for_types(source):
    """Return the source with what stands under TYPE_CHECKING left out: that is never run."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    return ast.unparse(tree)


def cycles(sources):
    """Return the groups of modules that import each other in a circle; ``sources``: name -> (package, source)."""
    graph = {name: set() for name in sources}
    for name, (package, source) in sources.items():
        for target in imports(source, package):
            while target and target not in sources:
                target = target.rpartition(".")[0]
            if target and target != name:
                graph[name].add(target)

    def reached(start):
        seen, todo = set(), [start]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    reach = {name: reached(name) for name in graph}
    return {frozenset(b for b in reach[a] if a in reach[b]) for a in graph if a in reach[a]}


def violations(name, package, source):
    """Yield what one module imports against the rules."""
    for target in imports(source, package):
        for dependency, doors in DOORWAYS.items():
            if within(target, dependency) and not any(within(name, door) for door in doors):
                yield f"{name} imports {target}; {dependency} may be imported in {sorted(doors) or 'tests'} only"
        if not any(within(target, ours) for ours in ("longstraw", "hydra_plugins")) or name == "longstraw":
            continue
        mine, other = floor(name), floor(target)
        if mine is not None and other is not None and other > mine:
            yield f"{name} (floor {mine}) imports {target} (floor {other})"
    if any(within(name, light) for light in WITHOUT_TORCH):
        for target in imports(for_types(source), package):
            if within(target, "torch"):
                yield f"{name} imports {target}, but must do without torch"


ALL = {name: (package, source) for name, package, source in modules()}


@pytest.mark.parametrize("name", ALL)
def test_imports_go_downwards_and_through_doorways(name):
    assert not list(violations(name, *ALL[name]))


def test_every_module_has_a_floor_and_every_floor_modules():
    missing = [name for name in ALL if not within(name, "analysis") and floor(name) is None]
    assert not missing, "give these a floor in FLOORS"
    known = {name for names in FLOORS for name in names} | WITHOUT_TORCH | set().union(*DOORWAYS.values())
    assert not {name for name in known if name not in ALL and not any(within(x, name) for x in ALL)}


def test_no_modules_import_each_other_in_a_circle():
    assert not cycles(ALL)


def test_a_circle_is_found_also_where_it_is_for_types_only():
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from longstraw.b import B"
    sources = {
        "longstraw.a": ("longstraw", typed),
        "longstraw.b": ("longstraw", "def f():\n    import longstraw.c"),
        "longstraw.c": ("longstraw", "from longstraw import a"),
        "longstraw.d": ("longstraw", "from longstraw import a"),
    }
    assert cycles(sources) == {frozenset({"longstraw.a", "longstraw.b", "longstraw.c"})}


def test_few_modules_stand_directly_in_the_package():
    assert len(list((ROOT / "longstraw").glob("*.py"))) <= 16


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
        ("longstraw.launch.jobs", "from longstraw.run import main"),
        ("hydra_plugins.longstraw_launcher.launcher", "from longstraw.run import main"),
        ("longstraw.memory.meter", "from longstraw.memory.fit import too_large"),
        ("longstraw.tracking.schema", "from longstraw.tracking.recorder import Recorder"),
        ("longstraw.units", "import torch"),
        ("longstraw.tracking.recorder", "from longstraw.training.loop import run_job"),
        ("analysis.capacity", "from torch import Tensor"),
        (
            "longstraw.state",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from longstraw.step import Retained",
        ),
    ],
)
def test_rules_can_fail(name, source):
    assert list(violations(name, name.rpartition(".")[0], source))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("longstraw.step", "from longstraw.state import RetainedState\nimport torch"),
        ("longstraw.units", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"),
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
    assert "it offers Group, build_model, grpo_step, load_model, prefill, sample" in done.stderr
