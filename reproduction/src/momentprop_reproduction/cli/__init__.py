"""The verbs that this distribution adds to the command `momentprop`; pyproject.toml declares them."""
