"""What a network with uncertainty costs: latency, throughput, memory and multiply-adds, per runtime."""
