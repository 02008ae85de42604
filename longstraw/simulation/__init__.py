"""One rank's step on fake tensors or on one device: what it takes, without the hardware it is for."""
