"""Make ``helpers`` importable for tests, and limit torch's threads because several test processes share the cores."""

import importlib.machinery
import os
import sys

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


class PlainOracle:
    """Import transformers' Qwen3.5 as if fla were not there: where it is, the class runs its kernels, on CPUs too."""

    NAMES = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3_5", "qwen3_5_moe"))

    def find_spec(self, name, path=None, target=None):
        if name not in self.NAMES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def without_fla(module):
            loaded = {"fla": sys.modules["fla"]} if "fla" in sys.modules else {}
            sys.modules["fla"] = None
            try:
                run(module)
            finally:
                del sys.modules["fla"]
                sys.modules.update(loaded)

        spec.loader.exec_module = without_fla
        return spec


sys.meta_path.insert(0, PlainOracle())
