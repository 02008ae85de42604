"""Records of a run: the keys, the files they are written to, W&B's copy, and where a result comes from."""
