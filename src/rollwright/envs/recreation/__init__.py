"""Environments that are recreated when they fail.

One policy (:mod:`.policy`) limits how often an environment may fail in a row and what its replacement takes over. Two
wrappers use it: :class:`~.env.RecreatedEnv` on TensorDicts and :class:`~.arrays.RecreatedArrays` on arrays.
Environments in other processes may be lost with their process, which :mod:`.rows` settles for the batch.
"""

__all__: list[str] = []
