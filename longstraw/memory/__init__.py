"""Bytes: counted while a step runs, estimated before it, and held against what the hardware has."""
