"""Measures what a network with uncertainty costs: latency, throughput, memory, multiply-adds, per runtime."""
