"""PACT: problem, curves, node sets, time-expanded graph, solvers, bounds, baselines. Never imports torch."""
