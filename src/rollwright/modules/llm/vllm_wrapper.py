"""A language model of vLLM as a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase

from rollwright.data.llm.turns import InputMode, LayoutName, LogProbMode
from rollwright.modules.llm.engine import Engine, Sampling
from rollwright.modules.llm.sampling import sampling_of
from rollwright.modules.llm.serving.async_engine import AsyncEngine
from rollwright.modules.llm.serving.servers import AsyncSGLang
from rollwright.modules.llm.serving.vllm import AsyncVLLM
from rollwright.modules.llm.wrapper import EngineWrapper, Keys, template_of


class vLLMWrapper(EngineWrapper):
    """A language model of vLLM: generates responses. Needs vLLM: ``pip install vllm`` (Linux, with a GPU).

    It reads and writes what :class:`TransformersWrapper` with ``generate=True`` does; log-probabilities of given tokens
    come from that class. ``update_policy_weights_()`` of a collector gives vLLM the weights of the model of
    transformers that is trained.

    Args:
        model: the name or directory of a model, which starts vLLM in a process of its own; the address of a ``vllm
            serve`` (``http://...``, see :meth:`AsyncVLLM.connect`); an ``AsyncLLM``; or an engine, such as
            :class:`AsyncVLLM`.
        tokenizer: None: that of ``model``.
        generate: True.
        engine_args: of vLLM's ``AsyncEngineArgs``, where ``model`` is a name.

    All others are those of :class:`TransformersWrapper`.

    Raises:
        MissingExtraError: vLLM is not installed.
        TypeError: ``model`` is something else, such as a ``vllm.LLM``, which answers in batches only.
        ValueError: ``generate=False``, or an argument has no such value; ``log_prob_mode`` is not that of ``model``.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        input_mode: InputMode | None = None,
        generate: bool = True,
        return_log_probs: bool = True,
        log_prob_mode: LogProbMode = "sampled",
        generate_kwargs: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        pad_output: bool = False,
        num_samples: int | None = None,
        inplace: bool | None = None,
        record_layout: LayoutName | None = None,
        keys: Keys | None = None,
        policy_version: int | str = 0,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        if not generate:
            raise ValueError(
                "generate: expected True; log-probabilities of given tokens come from TransformersWrapper."
            )
        sampling = sampling_of(dict(generate_kwargs or {}), log_prob_mode=log_prob_mode)
        if isinstance(model, Engine):
            engine = _with_sampling(model, sampling, given=generate_kwargs is not None)
            if engine_args:
                raise TypeError("engine_args: expected only with the name of a model, got an engine beside it.")
        elif isinstance(model, str) and model.startswith(("http://", "https://")):
            engine = AsyncVLLM.connect(model, tokenizer=tokenizer, sampling=sampling, **(engine_args or {}))
        else:
            engine = AsyncVLLM(
                model, tokenizer=tokenizer, sampling=sampling, version=policy_version, **(engine_args or {})
            )
        super().__init__(
            tokenizer=engine.tokenizer if tokenizer is None else tokenizer,
            input_mode=input_mode,
            keys=keys or Keys(),
            record_layout=record_layout,
            return_log_probs=return_log_probs,
            pad_output=pad_output,
            num_samples=num_samples,
            inplace=num_samples is None if inplace is None else inplace,
            template=template_of(chat_template_kwargs, chat_template, chat_template_name),
            sampling=engine.sampling,
        )
        self.generate = True
        self._engine = engine
        self.set_keys()

    @property
    def engine(self) -> Engine:
        """What generates. Collectors use it directly."""
        return self._engine

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Generate; see :meth:`TransformersWrapper.forward`."""
        return self.answer(tensordict)


class SGLangWrapper(vLLMWrapper):
    """A language model on a server of SGLang: generates responses. See :class:`vLLMWrapper` and :class:`AsyncSGLang`.

    Args:
        model: the address of a server, ``http://host:port``, or an engine.
        **kwargs: of :class:`vLLMWrapper`.
    """

    def __init__(self, model: Any, **kwargs: Any) -> None:
        if isinstance(model, str):
            model = AsyncSGLang.connect(model, tokenizer=kwargs.get("tokenizer"))
        super().__init__(model, **kwargs)


def _with_sampling(engine: Engine, sampling: Sampling, *, given: bool) -> Engine:
    """An engine that samples as a wrapper says; as it did where the wrapper says nothing."""
    if given and sampling != engine.sampling:
        if not isinstance(engine, AsyncEngine):
            raise TypeError(
                f"generate_kwargs: expected None beside a {type(engine).__name__}, which has its own sampling. Pass "
                "them to the engine."
            )
        engine.sample_with(sampling)
    return engine
