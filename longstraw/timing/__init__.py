"""How long a step would take on hardware that is not here, from what its operations compute, move and send."""
