"""Pufferfish: factorized layers, decomposition, rank rules, model surgery, checkpoints.

The way through: `choice.choose` looks at a model and returns a `Structure`; `surgery.apply_` makes
the model have it. Each layer type is one file (`linear`, `conv`, `attention`, `rnn`, `embedding`),
a subclass of `factorized.Factorized`, and one line in `layers.KINDS`.
"""
