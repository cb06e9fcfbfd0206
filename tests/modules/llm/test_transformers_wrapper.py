"""The wrapper of transformers: TensorDict in, TensorDict out."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack
from tests.llm_models import model, tokenizer

import rollwright.modules
from rollwright.data.llm.history import ChatHistory, History
from rollwright.modules.llm import Keys, Sampling, TransformersWrapper, token_log_probs

pytestmark = pytest.mark.llm
KWARGS = {"max_new_tokens": 6}
TEXTS = ["two plus three", "hello", "the quick brown fox"]


def _wrapper(kind: str = "qwen", **kwargs: Any) -> TransformersWrapper:
    kwargs.setdefault("generate_kwargs", KWARGS)
    lm = kwargs.pop("model", None)
    return TransformersWrapper(lm or model(), tokenizer=tokenizer(kind), **kwargs)


def _texts(nested: bool = True, **entries: Any) -> TensorDict:
    texts = NonTensorStack(*TEXTS)
    seeds = torch.arange(3)
    return TensorDict({"text": TensorDict({"prompt": texts}, [3]) if nested else texts, "seed": seeds, **entries}, [3])


def test_text_in_a_nested_record_out() -> None:
    td = _texts()
    plain = tokenizer()
    assert _wrapper()(td) is td
    for place, row in enumerate(td.unbind(0)):
        prompt, response, full = (row["tokens", name] for name in ("prompt", "response", "full"))
        assert prompt.tolist() == plain(TEXTS[place])["input_ids"]
        assert full.tolist() == prompt.tolist() + response.tolist()
        assert row["text", "full"] == TEXTS[place] + row["text", "response"]
        assert row["masks", "all_assistant_mask"].tolist() == [False] * len(prompt) + [True] * len(response)
        assert row["masks", "all_attention_mask"].all()
        assert row["log_probs", "full"].shape == full.shape
        assert torch.equal(row["log_probs", "full"][len(prompt) :], row["log_probs", "response"])
        assert row["tokens", "policy_version"].tolist() == [0] * len(response)
        assert row["policy_version"] == 0
        assert row["finish_reason"] in ("stop", "length")
        assert row["log_prob_mode"] == "sampled"
        assert row["seconds", "generation"] > 0
    assert "history" not in td


def test_text_in_a_flat_record_out() -> None:
    td = _wrapper(return_log_probs=False)(_texts(nested=False))
    assert isinstance(td, LazyStackedTensorDict)
    for place, row in enumerate(td.unbind(0)):
        assert row["text"] == TEXTS[place]
        assert row["tokens_response"].tolist() == row["tokens"].tolist()[-len(row["tokens_response"]) :]
        assert row["attention_mask"].shape == row["tokens"].shape
        assert "log_probs" not in row
    nested = _wrapper(record_layout="nested")(_texts(nested=False).exclude("text").set("text", _texts()["text"]))
    assert nested["tokens"].get("response", as_list=True)[0].tolist() == td[0]["tokens_response"].tolist()
    kept = _wrapper().layout, _wrapper(record_layout="flat").layout
    assert kept[0] is None
    assert kept[1] is not None
    assert not kept[1].nested


def test_history_is_written_by_the_chat_template() -> None:
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    history = lazy_stack([ChatHistory(prompt=History.from_chats(chat), batch_size=()) for chat in chats])
    td = TensorDict({"history": history, "seed": torch.arange(3)}, [3])
    td = _wrapper(input_mode="history")(td)
    ids = tokenizer().apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
    for row, expected, chat in zip(td.unbind(0), ids, chats, strict=True):
        assert row["tokens", "prompt"].tolist() == expected
        answer = {"role": "assistant", "content": row["text", "response"]}
        assert row["history"].full.to_chats() == [*chat, answer]
        assert row["history"].response.to_chats() == [answer]


def test_the_seed_decides_and_the_batch_does_not() -> None:
    wrapper = _wrapper()
    together = wrapper(_texts())["tokens"].get("response", as_list=True)
    for place in range(3):
        alone = wrapper(_texts()[place].clone())
        assert torch.equal(alone["tokens", "response"], together[place])
    torch.manual_seed(3)
    first = wrapper(_texts().exclude("seed"))["tokens"].get("response", as_list=True)
    torch.manual_seed(3)
    again = wrapper(_texts().exclude("seed"))["tokens"].get("response", as_list=True)
    other = wrapper(_texts().exclude("seed"))["tokens"].get("response", as_list=True)
    assert [tokens.tolist() for tokens in first] == [tokens.tolist() for tokens in again]
    assert [tokens.tolist() for tokens in first] != [tokens.tolist() for tokens in other]


def test_tokens_that_an_environment_keeps_are_the_prompt() -> None:
    kept = torch.tensor([[5, 6, 7]] * 3)
    td = _texts().update({"tokens": {"prompt": kept}})
    td = _wrapper()(td)
    assert [row["tokens", "prompt"].tolist() for row in td.unbind(0)] == kept.tolist()
    td = _wrapper()(td)  # now a response stands beside them: the text is the prompt
    assert td[1]["tokens", "prompt"].tolist() == tokenizer()("hello")["input_ids"]


def test_padded_tokens_are_read_by_their_mask() -> None:
    ids, mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    td = TensorDict({"tokens": ids, "attention_mask": mask, "seed": torch.arange(2)}, [2])
    wrapper = TransformersWrapper(model(), input_mode="tokens", generate_kwargs=KWARGS, record_layout="flat")
    assert wrapper.in_keys == ["tokens"]
    td = wrapper(td)
    assert td[0]["tokens"].tolist()[:2] == [5, 6]
    assert len(td[0]["tokens"]) == 8
    assert "text_response" not in td.keys()  # noqa: SIM118


def test_pad_output_pads_on_the_right() -> None:
    td = _wrapper(pad_output=True, generate_kwargs={"max_new_tokens": 6, "stop_token_ids": list(range(200))})(_texts())
    ragged = _wrapper(generate_kwargs={"max_new_tokens": 6, "stop_token_ids": list(range(200))})(_texts())
    assert not isinstance(td, LazyStackedTensorDict)
    for place, row in enumerate(ragged.unbind(0)):
        size = len(row["tokens", "full"])
        assert torch.equal(td["tokens", "full"][place, :size], row["tokens", "full"])
        assert (td["tokens", "full"][place, size:] == tokenizer().pad_token_id).all()
        assert not td["masks", "all_attention_mask"][place, size:].any()
        assert (td["tokens", "policy_version"][place, len(row["tokens", "response"]) :] == -1).all()
    assert td["text", "response"][0] == ragged[0]["text", "response"]


def test_samples_of_a_prompt() -> None:
    wrapper = _wrapper(num_samples=4)
    td = _texts()
    found = wrapper(td)
    assert found.batch_size == (3, 4)
    assert "tokens" not in td
    one = _wrapper()(_texts())
    assert torch.equal(found[1, 0]["tokens", "response"], one[1]["tokens", "response"])
    assert len({tuple(found[1, place]["tokens", "response"].tolist()) for place in range(4)}) == 4
    same = _wrapper(generate_kwargs={**KWARGS, "n": 4}, pad_output=True)(_texts())
    assert torch.equal(same[1, 2]["tokens", "response"], found[1, 2]["tokens", "response"])


@pytest.mark.parametrize("mode", ["sampled", "raw"])
def test_log_probs_of_given_tokens_equal_those_of_the_draw(mode: str) -> None:
    lm, kwargs = model(), {**KWARGS, "temperature": 0.7}
    td = _wrapper(model=lm, log_prob_mode=mode, generate_kwargs=kwargs)(_texts())
    trained = _wrapper(model=lm, generate=False, log_prob_mode=mode, generate_kwargs=kwargs)
    assert trained.engine is None
    found = trained(td.copy())
    for row, before in zip(found.unbind(0), td.unbind(0), strict=True):
        assert torch.allclose(row["log_probs", "response"], before["log_probs", "response"], atol=1e-4)
        assert row["log_probs", "full"][0] == 0
    mask_key = ("masks", "all_assistant_mask")
    for side in ("left", "right"):
        tokens = td.get(("tokens", "full"), as_padded_tensor=True, padding_side=side, padding_value=-100)
        stored = td.get(("log_probs", "full"), as_padded_tensor=True, padding_side=side, padding_value=0.0)
        dist = trained.get_dist(td, mask_key=mask_key, padding_side=side)
        log_probs = dist.log_prob(tokens)
        assert torch.allclose(log_probs, stored, atol=1e-4)
        assert torch.equal(log_probs, trained.log_prob(td, mask_key=mask_key, padding_side=side))
        assert (dist.entropy() > 0).equal(dist.mask)
    log_probs.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in lm.parameters())


def test_get_dist_of_a_collected_batch_keeps_its_shape() -> None:
    td = _wrapper()(_texts())
    trained = _wrapper(generate=False)
    stacked = lazy_stack([td, td.clone()], 1)
    log_probs = trained.log_prob(stacked)
    assert log_probs.shape[:2] == (3, 2)
    assert torch.equal(log_probs[:, 0], log_probs[:, 1])
    assert torch.allclose(log_probs[:, 0], trained.log_prob(td), atol=1e-5)


def test_text_and_history_in_full_are_tokenised_where_there_are_no_tokens() -> None:
    trained = _wrapper(generate=False)
    texts = TensorDict({"text": TensorDict({"full": NonTensorStack(*TEXTS)}, [3])}, [3])
    found = trained(texts)[0]["log_probs", "full"]
    ids = torch.tensor(tokenizer()(TEXTS[0])["input_ids"])
    expected = token_log_probs(trained.model(ids[None]).logits[0, :-1], ids[1:], Sampling())
    assert torch.allclose(found[1:], expected, atol=1e-5)


def test_other_keys() -> None:
    keys = Keys(tokens="ids", masks="which", log_probs="lp", text="words", seed="noise")
    td = _texts().rename_key_("text", "words").rename_key_("seed", "noise")
    td = _wrapper(keys=keys)(td)
    assert {"ids", "which", "lp", "words"} <= set(td.keys())
    assert not {"tokens", "masks", "log_probs", "text"} & set(td.keys())
    assert set(_wrapper(keys=keys).out_keys) >= {"ids", "which", "lp", "words"}


def test_a_wrapper_that_generates_is_never_copied_and_its_state_is_the_weights() -> None:
    wrapper, trained = _wrapper(), _wrapper(generate=False)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Pass policy_factory"):
            attempt(wrapper)  # type: ignore[operator]
    assert wrapper.state_dict().keys() == {f"model.{key}" for key in wrapper.model.state_dict()}
    assert copy.deepcopy(trained).log_prob(_wrapper()(_texts())).shape[0] == 3
    assert wrapper.engine is not None
    wrapper.engine.update_weights(trained)  # by names of the wrapper
    wrapper.engine.update_weights(trained.state_dict())
    wrapper.engine.update_weights(TensorDict.from_module(trained).data)
    assert wrapper.engine.version == 3


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"input_mode": "chat"}, "input_mode: expected 'history'"),
        ({"record_layout": "wide"}, "record_layout: expected 'nested'"),
        ({"record_layout": "flat", "input_mode": "history"}, "no place for the messages"),
        ({"num_samples": 0}, "num_samples: expected at least 1"),
        ({"num_samples": 2, "inplace": True}, "inplace: expected False"),
        ({"generate_kwargs": {"num_beams": 2}}, "'num_beams' are not supported"),
        ({"generate": False, "return_log_probs": False}, "return_log_probs: expected True"),
        ({"tokenizer_kwargs": {"use_fast": True}}, "tokenizer_kwargs: expected only with the name"),
        ({"kind": "plain", "input_mode": "history"}, "has no chat template"),
    ],
)
def test_wrong_arguments_are_errors(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _wrapper(**kwargs)


def test_wrong_prompts_are_errors() -> None:
    with pytest.raises(KeyError, match="found no prompt"):
        _wrapper()(TensorDict({"observation": torch.zeros(3)}, [3]))
    with pytest.raises(ValueError, match="the model has 512 positions"):
        _wrapper()(TensorDict({"tokens": {"prompt": torch.zeros(1, 512, dtype=torch.int64)}}, [1]))
    with pytest.raises(ValueError, match=r"token ids \[512\] are outside"):
        _wrapper()(TensorDict({"tokens": {"prompt": torch.full((1, 3), 512)}}, [1]))
    with pytest.raises(ValueError, match="tokens of row 0: expected ids in"):
        _wrapper(generate=False)(TensorDict({"tokens": {"full": torch.full((1, 3), 512)}}, [1]))
    with pytest.raises(ValueError, match="generate_kwargs: log-probabilities under penalties"):
        _wrapper(generate=False, generate_kwargs={"presence_penalty": 1.0})


def test_modules_has_it_too() -> None:
    assert rollwright.modules.TransformersWrapper is TransformersWrapper


def test_chat_templates_by_text_and_by_name() -> None:
    chats = History.from_chats([[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]])
    written = {}
    ways: dict[str, dict[str, Any]] = {
        "own": {},
        "qwen": {"chat_template_name": "qwen"},
        "name": {"chat_template_name": "chatml_format"},
        "text": {"chat_template": "{% for m in messages %}{{ m.content }}/{% endfor %}"},
        "arguments": {"chat_template_kwargs": {"chat_template": "{% for m in messages %}{{ m.content }}/{% endfor %}"}},
    }
    for name, options in ways.items():
        td = TensorDict({"history": ChatHistory(prompt=chats, batch_size=[1])}, [1])
        written[name] = _wrapper(**options)(td)["text", "prompt"][0]
    assert written["own"] == written["qwen"]
    assert written["name"] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert written["text"] == written["arguments"] == "Be brief./hello/"
    with pytest.raises(ValueError, match="chat_template_name: expected 'chatml_format' or 'qwen', got 'llama'"):
        _wrapper(chat_template_name="llama")
    with pytest.raises(ValueError, match="chat_template: expected one template, got several"):
        _wrapper(chat_template_name="chatml_format", chat_template="{{ messages }}")
