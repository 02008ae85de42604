"""Stands here so that tests can import ``helpers``; keeps torch from fighting over cores with other test processes."""

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
