from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
from serving_fakes import END_OF_TURN, hf_tokenizer, tiny_tokenizer

from loraplex.core.errors import InvalidRequestError, ModelError
from loraplex.engine.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 400,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "eos_token_id": 0,
}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    hf_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_encode_and_decode_are_inverse() -> None:
    text = "Hello wörld 😀"
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_other_threads_run_while_tokens_are_decoded() -> None:
    tokenizer, ids = tiny_tokenizer(), [5] * 200_000
    may_run, has_run = threading.Event(), threading.Event()

    def run() -> None:
        may_run.wait()
        has_run.set()

    other = threading.Thread(target=run)
    other.start()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # the GIL is given to the other thread by this one, or not at all
    try:
        may_run.set()
        for _ in range(10):  # as the other thread may be slow to take it
            tokenizer.decode(ids)
        was_let_in = has_run.is_set()
    finally:
        sys.setswitchinterval(interval_s)
        other.join()
    assert was_let_in


def test_lone_surrogates_are_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequestError, match="surrogates"):
        tiny_tokenizer().encode("\ud800")


def test_a_conversation_is_rendered_by_the_models_template() -> None:
    text = tiny_tokenizer().render_chat([USER])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_tokenizer().render_chat([USER], add_generation_prompt=False).endswith("<|im_end|>\n")


def test_template_options_reach_the_template() -> None:
    assert tiny_tokenizer().render_chat([USER], template_options={"shout": True}).endswith("HEY ")


@pytest.mark.parametrize(
    "name",
    [
        *("tokenize", "messages", "chat_template", "tools", "self", "conversations"),
        *("eos_token", "raise_exception", "range"),
    ],
)
def test_options_that_belong_to_the_server_or_the_model_are_refused(name: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"may not hold '{name}', which the server or the model sets"
    ):
        tiny_tokenizer().render_chat([USER], template_options={name: "x"})


def test_what_the_template_refuses_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequestError, match="must come first") as caught:
        tiny_tokenizer().render_chat([USER, {"role": "system", "content": "late"}])
    assert caught.value.param == "messages"


def test_a_model_without_chat_template_says_what_to_use_instead() -> None:
    tokenizer = Tokenizer(hf_tokenizer(chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        tokenizer.render_chat([USER])


@pytest.mark.parametrize(
    ("generation", "expected"),
    [({"eos_token_id": [0, 1]}, (0, 1, 2)), ({"eos_token_id": 2}, (2,)), (None, (0, 2))],
)
def test_end_tokens_come_from_the_configuration_and_the_tokenizer(
    model_folder: Path, generation: dict[str, object] | None, expected: tuple[int, ...]
) -> None:
    if generation is not None:
        (model_folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = Tokenizer.load(model_folder)
    assert tokenizer.eos_token_ids == expected
    assert tokenizer.decode([2]) == END_OF_TURN
    assert tokenizer.vocab_size == 400


def test_truncation_stored_with_the_tokenizer_is_ignored() -> None:
    wrapped = hf_tokenizer()
    wrapped.backend_tokenizer.enable_truncation(max_length=3)
    assert len(Tokenizer(wrapped).encode("one two three four five six")) > 3


def test_a_folder_without_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match="tokenizer"):
        Tokenizer.load(tmp_path)
