"""Rollouts that other trainers stored, a file for each format, and the task that trains on them."""

from longstraw.data.rollouts.task import RolloutsTask, check_rollouts

__all__ = ["RolloutsTask", "check_rollouts"]
