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

from rollwright.testing.suites import add_tests, checks_in
from rollwright.testing.transports import data_checks, fault_checks, weight_checks
from rollwright.testing.transports.trial import TransportSettings, Trial

TRANSPORT_CHECKS = checks_in(data_checks) | checks_in(weight_checks) | checks_in(fault_checks)
"""By name: each is called with a :class:`~rollwright.testing.transports.trial.Trial`."""


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

    Each check is a method ``test_<name>``; override one with ``None`` to leave it out. The attributes are those of
    :class:`~rollwright.testing.transports.trial.TransportSettings`.

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

    def settings(self) -> TransportSettings:
        """The transport and the limits, from the attributes.

        Raises:
            TypeError: the class names no backend.
        """
        if not self.backend:
            raise TypeError(f"{type(self).__name__} names no backend: set the class attribute `backend`.")
        return TransportSettings(**{each.name: getattr(self, each.name) for each in fields(TransportSettings)})

    def check(self, name: str) -> None:
        """Run a check.

        Raises:
            AssertionError: it failed.
        """
        run_check(name, self.settings())


add_tests(TransportConformance, TRANSPORT_CHECKS, TransportConformance.check)
