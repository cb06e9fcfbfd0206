"""Checks of what a transport promises, for those who write one.

======================  ===============================================================================
``stacked``             a batch of all workers has the bits of single collectors with the same seeds
``concatenated``        ... joined along the environments, or along time
``batched``             ... of batched environments
``images``              ... of images
``recurrent``           ... of a recurrent policy
``reshaped``            ... changed by a ``postproc``
``entries``             ... with entries of every kind: text, ragged, tensorclasses, empty, removed, renamed
``asynchronous``        every frame once, each batch of one worker
``counts``              ``total_frames`` and all counters are exact
``trajectories``        ``trajs_per_batch`` whole trajectories in each batch
``buffer``              whole trajectories in a replay buffer; or it is refused
``backpressure``        workers rest while nothing is taken
``weights_by_version``  a batch acts with the version that was published before, and says so
``weights_every_way``   weights reach every module that a policy reads, in whatever way
``weights_of_one``      weights of the one module that a function reads have its names
``weights_by_worker``   weights of one worker are its own
``weights_whole``       no frame is acted by a mixture of two versions
``weights_in_rollout``  new weights act in the middle of a rollout
``calls``               ``map_fn``, ``get_distant_attr``, ``pause``, and what calls raise
``hooks``               ``init_fn``, hooks and ``postproc`` run in the workers
``saved_state``         a restored collector goes on with the same bits
``raising_worker``      what an environment raises comes with worker and traceback
``cannot_start``        so does what a factory raises, at construction
``cannot_send``         what cannot be pickled is named
``killed_worker``       a killed worker is an error soon
``replaced_worker``     ... or replaced, and no frame comes twice
``interrupt``           Ctrl-C in a wait is a KeyboardInterrupt at once
``shutdown``            nothing is left
======================  ===============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from rollwright.testing.transports.data_checks import DATA_CHECKS
from rollwright.testing.transports.fault_checks import FAULT_CHECKS
from rollwright.testing.transports.trial import TransportSettings, Trial
from rollwright.testing.transports.weight_checks import WEIGHT_CHECKS

__all__ = ["TRANSPORT_CHECKS", "TransportConformance", "check_transport"]

TRANSPORT_CHECKS: dict[str, Callable[[Trial], None]] = {**DATA_CHECKS, **WEIGHT_CHECKS, **FAULT_CHECKS}
"""By name; see :mod:`~rollwright.testing.transports.conformance`."""


def check_transport(
    backend: str,
    backend_options: Mapping[str, Any] | None = None,
    *,
    skip: Iterable[str] = (),
    only: Iterable[str] | None = None,
    **limits: Any,
) -> None:
    """Run the checks of this module on a transport.

    Args:
        backend: its name, see :func:`~rollwright.collectors.workers.transports.register_backend`.
        backend_options: of its collectors.
        skip: names of checks to leave out.
        only: names of checks to run; None: all.
        **limits: of :class:`~rollwright.testing.transports.trial.TransportSettings`, such as ``limit_s``.

    Raises:
        AssertionError: a check failed; the message gives what was expected and what came. What a collector raises where
            no error is expected passes through; its note names the check, too.
        ValueError: a name is that of no check.

    Example:
        >>> check_transport("process", only=["counts"], num_workers=2)
    """
    wanted, left_out = list(TRANSPORT_CHECKS if only is None else only), set(skip)
    unknown = ({*wanted} | left_out) - set(TRANSPORT_CHECKS)
    if unknown:
        raise ValueError(f"skip, only: expected names among {sorted(TRANSPORT_CHECKS)}, got {sorted(unknown)}.")
    settings = TransportSettings(backend=backend, backend_options=backend_options, **limits)
    for name in wanted:
        if name not in left_out:
            run_check(name, settings)


def run_check(name: str, settings: TransportSettings) -> None:
    """Run one check.

    Raises:
        AssertionError: it failed.
    """
    try:
        with Trial(settings) as trial:
            TRANSPORT_CHECKS[name](trial)
    except Exception as error:
        error.add_note(f"in the check {name!r} of backend {settings.backend!r}")
        raise


class TransportConformance:
    """The checks of :func:`check_transport` as pytest tests: inherit, and name the backend.

    Attributes: those of :class:`~rollwright.testing.transports.trial.TransportSettings`. Override a test with ``None``
    to leave it out.

    Example:
        >>> class TestSockets(TransportConformance):
        ...     backend = "tcp"
        ...     backend_options = {"num_workers_per_collector": 2}
    """

    backend: str = ""
    backend_options: Mapping[str, Any] | None = None
    num_workers: int = 3
    limit_s: float = 120.0
    interrupt_s: float = 1.0
    failure_s: float = 10.0
    gone_s: float = 5.0
    make_buffer: Callable[[], Any] | None = None
    stays: tuple[str, ...] = ()
    one_at_a_time: bool = False

    def check(self, name: str) -> None:
        """Run a check.

        Raises:
            AssertionError: it failed.
            TypeError: the class names no backend.
        """
        if not self.backend:
            raise TypeError(f"{type(self).__name__} names no backend: set the class attribute `backend`.")
        run_check(
            name, TransportSettings(**{each.name: getattr(self, each.name) for each in fields(TransportSettings)})
        )

    def test_stacked(self) -> None:
        """See the check ``stacked``."""
        self.check("stacked")

    def test_concatenated(self) -> None:
        """See the check ``concatenated``."""
        self.check("concatenated")

    def test_batched(self) -> None:
        """See the check ``batched``."""
        self.check("batched")

    def test_images(self) -> None:
        """See the check ``images``."""
        self.check("images")

    def test_recurrent(self) -> None:
        """See the check ``recurrent``."""
        self.check("recurrent")

    def test_reshaped(self) -> None:
        """See the check ``reshaped``."""
        self.check("reshaped")

    def test_entries(self) -> None:
        """See the check ``entries``."""
        self.check("entries")

    def test_asynchronous(self) -> None:
        """See the check ``asynchronous``."""
        self.check("asynchronous")

    def test_counts(self) -> None:
        """See the check ``counts``."""
        self.check("counts")

    def test_trajectories(self) -> None:
        """See the check ``trajectories``."""
        self.check("trajectories")

    def test_buffer(self) -> None:
        """See the check ``buffer``."""
        self.check("buffer")

    def test_backpressure(self) -> None:
        """See the check ``backpressure``."""
        self.check("backpressure")

    def test_weights_by_version(self) -> None:
        """See the check ``weights_by_version``."""
        self.check("weights_by_version")

    def test_weights_every_way(self) -> None:
        """See the check ``weights_every_way``."""
        self.check("weights_every_way")

    def test_weights_of_one(self) -> None:
        """See the check ``weights_of_one``."""
        self.check("weights_of_one")

    def test_weights_by_worker(self) -> None:
        """See the check ``weights_by_worker``."""
        self.check("weights_by_worker")

    def test_weights_whole(self) -> None:
        """See the check ``weights_whole``."""
        self.check("weights_whole")

    def test_weights_in_rollout(self) -> None:
        """See the check ``weights_in_rollout``."""
        self.check("weights_in_rollout")

    def test_calls(self) -> None:
        """See the check ``calls``."""
        self.check("calls")

    def test_hooks(self) -> None:
        """See the check ``hooks``."""
        self.check("hooks")

    def test_saved_state(self) -> None:
        """See the check ``saved_state``."""
        self.check("saved_state")

    def test_raising_worker(self) -> None:
        """See the check ``raising_worker``."""
        self.check("raising_worker")

    def test_cannot_start(self) -> None:
        """See the check ``cannot_start``."""
        self.check("cannot_start")

    def test_cannot_send(self) -> None:
        """See the check ``cannot_send``."""
        self.check("cannot_send")

    def test_killed_worker(self) -> None:
        """See the check ``killed_worker``."""
        self.check("killed_worker")

    def test_replaced_worker(self) -> None:
        """See the check ``replaced_worker``."""
        self.check("replaced_worker")

    def test_interrupt(self) -> None:
        """See the check ``interrupt``."""
        self.check("interrupt")

    def test_shutdown(self) -> None:
        """See the check ``shutdown``."""
        self.check("shutdown")
