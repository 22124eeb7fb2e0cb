"""Carries plans out: real training on a virtual clock, and what it leaves in a run folder."""
