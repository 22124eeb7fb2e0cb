"""Training: one round on one node's data, the rounds of a fleet, and the pilots a profile is made from."""
