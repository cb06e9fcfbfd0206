"""Process groups of torch.distributed, one for each remote group of workers, and what starts their other ends."""
