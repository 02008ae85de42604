"""Records of a run: their keys, the files they are written to, their copy in W&B, and commit and versions."""
