"""The paper's experiments, run again with momentprop: their data, their units of work, the results page."""
