"""Processes of a job: this one's rank, connecting the ranks, finding a failed one, and stopping on a signal."""
