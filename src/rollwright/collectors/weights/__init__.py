"""New weights for the policies of collectors: parsed, applied here, or published to workers."""

__all__: list[str] = []
