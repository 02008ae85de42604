"""The CUDA path, on fake tensors, without Triton and fla: what a simulation on a machine without a GPU runs."""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VOCABULARY = {"longstraw.reduce_logits", "longstraw.logit_gradients"}
LATENT = {"longstraw.latent_forward", "longstraw.latent_backward", "longstraw.latent_best_rows"}
ATTENTION = {
    "aten._flash_attention_forward",
    "aten._flash_attention_backward",
    "longstraw.attention_rows_backward",
    "longstraw.scratch",
}
DELTA = {f"longstraw.{op}_{way}" for op in ("conv", "gated_delta") for way in ("forward", "backward")}


def test_the_cuda_path_runs_on_fake_tensors_without_its_kernels():
    lines = (
        "import sys",
        "sys.modules.update(dict.fromkeys(('triton', 'fla')))",  # any import of these fails
        f"sys.path[:0] = [{str(ROOT)!r}, {str(HERE)!r}]",
        "import fused_fakes",
        "fused_fakes.main()",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    called = {name: set(operators) for name, operators in json.loads(done.stdout).items()}
    assert called == {
        "ops": ATTENTION | LATENT | DELTA | VOCABULARY,
        "qwen3_6_tiny": ATTENTION | DELTA | VOCABULARY,
        "glm_5_2_tiny": LATENT | VOCABULARY,
    }
