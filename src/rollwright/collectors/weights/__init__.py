"""New weights for the policies of collectors: parsed, applied locally, or published to workers."""

__all__: list[str] = []
