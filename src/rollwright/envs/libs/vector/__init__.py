"""Vector environments of gymnasium: resets on request (:mod:`.episodes`), their tensors (:mod:`.tensors`)."""

__all__: list[str] = []
