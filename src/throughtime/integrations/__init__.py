"""Thin adapters over the public names: Lightning, Ignite, Accelerate. Each needs its own extra."""
