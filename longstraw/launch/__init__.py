"""Jobs: checked together, frozen, placed, started on this machine or through SLURM, and shown while they run."""
