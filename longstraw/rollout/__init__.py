"""Where the responses of a group come from."""
