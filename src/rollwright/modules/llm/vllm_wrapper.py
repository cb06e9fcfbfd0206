"""A language model of vLLM as a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase

from rollwright.data.llm.turns import InputMode, LayoutName, LogProbMode
from rollwright.modules.llm.engine import Engine
from rollwright.modules.llm.sampling import sampling_of
from rollwright.modules.llm.vllm_engine import VLLMEngine, import_vllm
from rollwright.modules.llm.wrapper import EngineWrapper, Keys, template_of


class vLLMWrapper(EngineWrapper):
    """A ``vllm.LLM``: generates responses. Needs vLLM: ``pip install vllm`` (Linux, with a GPU).

    It reads and writes what :class:`TransformersWrapper` with ``generate=True`` does; log-probabilities of given tokens
    come from that class. vLLM is not part of rollwright's own tests: these run it on a stand-in with vLLM's names.

    Args:
        model: a ``vllm.LLM``, or the name or directory of a model for it.
        tokenizer: None: that of ``model``.
        generate: True.

    All others are those of :class:`TransformersWrapper`.

    Raises:
        MissingExtraError: vLLM is not installed.
        ValueError: ``generate=False``, or an argument has no such value; ``log_prob_mode`` is not that of the ``LLM``.
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
    ) -> None:
        vllm = import_vllm()
        if not generate:
            raise ValueError(
                "generate: expected True; log-probabilities of given tokens come from TransformersWrapper."
            )
        if isinstance(model, str):
            mode = {"sampled": "processed_logprobs", "raw": "raw_logprobs"}.get(log_prob_mode, log_prob_mode)
            model = vllm.LLM(model, logprobs_mode=mode)
        sampling = sampling_of(dict(generate_kwargs or {}), log_prob_mode=log_prob_mode)
        engine = VLLMEngine(model, sampling=sampling, tokenizer=tokenizer, version=policy_version)
        super().__init__(
            tokenizer=engine.tokenizer,
            input_mode=input_mode,
            keys=keys or Keys(),
            record_layout=record_layout,
            return_log_probs=return_log_probs,
            pad_output=pad_output,
            num_samples=num_samples,
            inplace=num_samples is None if inplace is None else inplace,
            template=template_of(chat_template_kwargs, chat_template, chat_template_name),
            sampling=sampling,
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
