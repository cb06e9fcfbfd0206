"""What a worker process collects with."""
