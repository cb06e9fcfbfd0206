"""A TransformedEnv on arrays (:mod:`.arrays`) and on tensors (:mod:`.tensors`)."""

__all__: list[str] = []
