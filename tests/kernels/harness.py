"""What tests of kernels share: buffers that show a stray access, mutants that must fail, one way to compare.

A check is a plain function ``check(fused)`` that takes the module under test, an op's host code, asserts, and returns
nothing. A test calls it with the real module; `assert_killed` calls it with mutants, each of which must fail.
"""

import contextlib
import importlib.util
import inspect
import itertools
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

OUTSIDE = tuple(f"test_{x}.py" for x in ("interpreted", "sm_90", "cuda_backend", "kernel_memory"))  # not interpreted
BARS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}  # relative RMS against float64
PAD = 64  # positions of NaN before and after
_count = itertools.count()
_folder = tempfile.TemporaryDirectory()  # the interpreter reads a mutant's source when it first runs it


def draw(*shape, dtype=torch.float32, seed=0, spread=1.0):
    """Return normal numbers of ``dtype``; give each tensor of a test a seed of its own."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * spread).to(dtype)


def padded(x):
    """Return ``x`` inside a larger buffer of NaN (-1 for integers), so that an unmasked read of its ends shows."""
    buffer = x.new_full((len(x) + 2 * PAD, *x.shape[1:]), math.nan if x.is_floating_point() else -1)
    buffer[PAD : len(buffer) - PAD] = x
    return buffer[PAD : len(buffer) - PAD]


@contextlib.contextmanager
def surroundings_unchanged(*tensors):
    """Assert that nothing is written outside ``tensors``, which `padded` made, in the block."""

    def surroundings(x):
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, (len(x) + 2 * PAD, *x.shape[1:]))
        return torch.cat([whole[:PAD], whole[-PAD:]]).clone()

    before = [surroundings(x) for x in tensors]
    yield
    for x, old in zip(tensors, before, strict=True):
        assert surroundings(x).equal(old) or torch.allclose(surroundings(x), old, rtol=0, atol=0, equal_nan=True)


def far(x, stride=1 << 27):
    """Return ``x`` with rows ``stride`` elements apart: index times stride passes 2^31 from row 16 on.

    The storage is many GB, of which only the pages touched are resident.
    """
    last = math.prod(x.shape[1:])
    storage = torch.UntypedStorage((len(x) * stride + last) * x.element_size())
    inner = torch.empty(x.shape[1:], device="meta").stride()
    spread = torch.empty(0, dtype=x.dtype).set_(storage, 0, x.shape, (stride, *inner))
    return spread.copy_(x)


def relative(value, target):
    """Return |value - target| / |target| in L2; infinite where a value is NaN, absolute where the target is 0."""
    value, target = value.detach().double(), target.detach().double()
    distance = float((value - target).norm() / (float(target.norm()) or 1.0))
    return math.inf if math.isnan(distance) else distance


def assert_close(values, targets, bar):
    """Assert that each of ``values``, a dict of tensors, is within ``bar`` of the target of its name."""
    assert values.keys() == targets.keys()
    distances = {name: relative(values[name], target) for name, target in targets.items()}
    assert all(values[name].shape == target.shape for name, target in targets.items())
    assert max(distances.values()) < bar, distances


def mutant(module, before, after):
    """Return a copy of ``module``, an op's host code, in which the only occurrence of ``before`` is ``after``.

    It may be in the module itself or in the kernels that it launches.
    """
    launched = importlib.import_module(module.__name__.rpartition(".")[0] + ".kernels")
    kernels = [x for x in vars(launched).values() if inspect.ismodule(x) and launched.__name__ in x.__name__]
    changed = [x for x in (module, launched, *kernels) for _ in range(Path(x.__file__).read_text().count(before))]
    assert len(changed) == 1, f"{before!r} occurs {len(changed)} times in {module.__name__} and its kernels"
    copy = _copy(module, before, after)
    if changed[0] is not module:
        other = _copy(changed[0], before, after)
        # what the package offers of the changed file, and that file itself by its name
        offered = {name: getattr(other, name, x) for name, x in vars(launched).items() if not name.startswith("__")}
        copy.kernels = SimpleNamespace(**offered | {changed[0].__name__.rpartition(".")[2]: other})
    return copy


def _copy(module, before, after):
    """Return ``module`` loaded anew with ``before`` replaced in its source, its operators under names of their own."""
    number = next(_count)
    source = Path(module.__file__).read_text().replace(before, after)
    path = Path(_folder.name) / f"mutant_{number}.py"
    path.write_text(source.replace('"longstraw::', f'"longstraw_mutant_{number}::'))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed


def assert_killed(check, module, before, after):
    """Assert that ``check`` passes on ``module``'s source and fails once ``before`` is replaced by ``after``."""
    changed = mutant(module, before, after)
    try:
        check(changed)
    except AssertionError:
        return
    except Exception as error:
        if "AssertionError(" not in str(error):  # the interpreter hands on in words what it stops for
            raise
        return
    raise RuntimeError(f"nobody saw that {before!r} became {after!r}")
