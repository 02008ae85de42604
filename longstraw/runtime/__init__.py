"""Processes of a job: who this one is, how its ranks meet, which one failed, and how one is asked to stop."""
