"""Measurements, never tests: ratios within one run, written to `results/` with command, seed and machine."""
