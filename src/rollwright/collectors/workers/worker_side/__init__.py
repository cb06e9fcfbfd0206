"""The collector inside a worker process."""
