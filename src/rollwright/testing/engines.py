"""Checks of the contract of Engine, for engines of language models; needs transformers.

=====================  =======================================================================================
``log_probs``          log-probabilities are those of a forward pass, for each way of sampling
``joins``              a short request that comes later ends before a long one
``cancel``             cancelled responses come once, with the tokens so far
``pause``              a paused engine samples nothing, and keeps what it was asked
``limits``             no response is longer than request, sampling and model allow
``refusals``           wrong requests are refused whole, by name
``ends``               a response ends at the first token or string that ends it
``versions``           each token has the version of the weights that sampled it
``prefixes``           a prompt that begins after an update reads nothing that earlier weights have computed
``wrong_weights``      weights that do not fit are refused, and the old ones stay
``updates_in_flight``  updates at random moments lose nothing, and each token is of the version that it says
``updates_that_wait``  updates between responses: each response is of one version
``seeds``              equal seeds give equal tokens
``close``              closing cancels, and a closed engine refuses
=====================  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rollwright.modules.llm.engine import Engine, Sampling
from rollwright.testing import engine_checks
from rollwright.testing.engine_checks import EngineCase
from rollwright.testing.suites import checks_in

ENGINE_CHECKS = checks_in(engine_checks)
"""By name: each is called with an :class:`EngineCase`."""


def check_engine(
    make_engine: Callable[[Sampling], Engine], model: Any, other: Any, *, skip: Iterable[str] = (), **options: Any
) -> dict[str, float]:
    """Run every check on an engine.

    Args:
        make_engine: returns an engine that samples in the way it is given; each check closes the engine that it made.
        model: of transformers; log-probabilities are compared with it, and each engine is given its weights at first.
            An engine that generates with a module in this process needs a copy of it.
        other: of the same structure, with other weights.
        skip: names of checks to leave out.
        **options: of :class:`EngineCase`: ``log_prob_mode``, ``deterministic``, ``tolerance``, ``max_length``,
            ``updates``.

    Returns:
        What the checks have measured, by name.

    Raises:
        PolicyError: a check failed; the message says what was expected, and what came.
        ValueError: ``skip`` names no check.

    Example:
        >>> import copy, transformers
        >>> from rollwright.modules.llm import TransformersEngine
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...     max_position_embeddings=64, bos_token_id=None, eos_token_id=None, initializer_range=0.5,
        ... )
        >>> model, other = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
        >>> figures = check_engine(
        ...     lambda sampling: TransformersEngine(copy.deepcopy(model), sampling=sampling), model, other,
        ...     skip=set(ENGINE_CHECKS) - {"log_probs"},
        ... )
        >>> figures["largest difference of log-probabilities"] < 1e-4
        True
    """
    left_out = set(skip)
    if unknown := left_out - ENGINE_CHECKS.keys():
        raise ValueError(f"skip: expected names among {sorted(ENGINE_CHECKS)}, got {sorted(unknown)}. Take these out.")
    case = EngineCase(make_engine, model, other, **options)
    for name, check in ENGINE_CHECKS.items():
        if name not in left_out:
            try:
                check(case)
            except Exception as error:
                error.add_note(f"in the check {name!r} of check_engine")
                raise
    return case.figures
