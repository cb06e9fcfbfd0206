"""What `rollwright bench` and the benchmarks measure with: handwritten loops, and turns."""

__all__: list[str] = []
