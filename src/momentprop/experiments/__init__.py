"""The paper's experiments: trained, evaluated, put on one page beside the paper's figures."""
