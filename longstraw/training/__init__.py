"""The training loop: steps, optimizer, checkpoints, and the measurement of memory and time."""
