"""Hydra finds launchers in this namespace only."""
