"""TorchRL's environments of gymnasium, and its transforms, on arrays."""

__all__: list[str] = []
