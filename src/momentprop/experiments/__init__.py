"""Small experiments on the public API: train, convert, compare with the plain network and MC dropout.

`toy.run` is the paper's regression on one input, `digits.run` a classifier that meets unknown classes.
Both return a dataclass with the arrays behind the figures and a `table` of numbers per method.
"""
