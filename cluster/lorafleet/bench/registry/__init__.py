"""Figures of the registry: concurrent histories, crashes, faults of Redis, size, pushes."""
