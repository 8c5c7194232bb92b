"""The results page: what the experiments' records say, beside the paper's figures, in Markdown."""
