"""Two small experiments that `momentprop demo` runs: train, convert, compare with MC dropout.

`toy.run` is a regression on one input, `digits.run` a classifier that meets unknown classes. Both return a
dataclass with the arrays behind the figures and a `table` of numbers per method.
"""
