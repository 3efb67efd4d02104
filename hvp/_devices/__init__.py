"""Devices: their names, threads that wait for them, and what stands there for variables."""
