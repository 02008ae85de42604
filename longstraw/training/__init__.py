"""The training loop: steps, optimizer, checkpoints, and what is measured meanwhile."""
