"""What a collector reports about itself: its statistics, in words, and in files for ``rollwright top``."""
