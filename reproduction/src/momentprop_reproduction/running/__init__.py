"""Units of work that run anywhere and resume: in this process, in several, or on a Ray cluster."""
