"""What ``inspect`` and ``watch`` do with datasets: open, check, and show them."""
