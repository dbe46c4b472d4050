"""Text to ids and back: the same as transformers, from every kind of folder; clear errors for bad ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers

from quire.errors import ModelError
from quire.tokenizer.tokenizer import Tokenizer
from tests.frontend.conftest import CORPUS, MAKERS, train_byte_level, write_folder
from tests.helpers.errors import refused

TEXTS = [
    *CORPUS,
    "",
    " ",
    "  two  spaces ",
    "<|im_start|>user\nhi<|im_end|>",
    "<s>a</s> b",
    "tab\tnew\nline\r\n\x00 nul",
    "ﬁ ligature é combining",
]
KINDS = ["byte_level", "llama", "first", "metaspace"]


@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_decode_as_transformers_does(folders: dict[str, Path], kind: str) -> None:
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast.from_pretrained(folders[kind])
    tokenizer = Tokenizer.from_folder(folders[kind])
    for text in TEXTS:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == oracle.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert tokenizer.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)
    assert tokenizer.bos_token_id == oracle.bos_token_id
    assert tokenizer.eos_token_id == oracle.eos_token_id
    assert tokenizer.vocab_size == len(oracle)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_random_ids_matches_the_library(folders: dict[str, Path], kind: str) -> None:
    tokenizer = Tokenizer.from_folder(folders[kind])
    library = tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
    rng = random.Random(kind)
    num_compared = 0
    for _ in range(500):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 12))]
        for skip in (True, False):
            expected = library.decode(ids, skip_special_tokens=skip)
            # The library spoils a whole run of byte tokens when one of them is wrong; we only the wrong ones.
            if kind == "byte_level" or "\ufffd" not in expected:
                assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
                num_compared += 1
    assert num_compared > 20


def test_a_broken_byte_does_not_spoil_its_neighbours(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_folder(folders["llama"])
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (*"é".encode(), 0xFF, *"字".encode())]
    assert tokenizer.decode([index for index in ids if index is not None]) == "é\ufffd字"


def test_long_texts_tokenize_as_short_ones_do(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_folder(folders["byte_level"])
    library = tokenizers.Tokenizer.from_file(str(folders["byte_level"] / "tokenizer.json"))
    text = " ".join(CORPUS * 20)
    assert tokenizer.encode(text) == library.encode(text).ids


def test_ids_without_a_token_decode_to_nothing(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_folder(folders["byte_level"])
    ids = tokenizer.encode("fox")
    assert tokenizer.decode([*ids, tokenizer.vocab_size + 7]) == "fox"
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""
    assert tokenizer.decode([-1, *ids, 2**70]) == "fox"


def test_token_bytes_join_to_the_text(folders: dict[str, Path]) -> None:
    for kind in ("byte_level", "llama"):
        tokenizer = Tokenizer.from_folder(folders[kind])
        ids = tokenizer.encode("naïve 😀 字", add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().lstrip() == "naïve 😀 字"


def test_token_text_shows_half_characters_as_replacement(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_folder(folders["llama"])
    index = tokenizer.token_to_id("<0xF0>")
    assert index is not None
    assert tokenizer.token_text(index) == "\ufffd"
    assert tokenizer.token_bytes(index) == b"\xf0"


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_lone_surrogates_are_refused(folders: dict[str, Path], text: str) -> None:
    with refused("prompt", "invalid_value"):
        Tokenizer.from_folder(folders["byte_level"]).encode(text)


def test_a_folder_without_tokenizer_lists_the_files_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json.*vocab\.json with merges\.txt"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"convert it to tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("tokenizer.json", "{}", r"tokenizer\.json: not a tokenizer"),
        ("tokenizer.json", "nonsense", r"tokenizer\.json: not a tokenizer"),
        ("tokenizer_config.json", "[1]", r"tokenizer_config\.json"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template is 5"),
        ("special_tokens_map.json", "{", r"special_tokens_map\.json"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, match: str) -> None:
    write_folder(tmp_path, "byte_level")
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=match):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("add_bos", [True, False])
def test_vocab_and_merges_alone_are_enough(tmp_path: Path, add_bos: bool) -> None:
    """As OPT's folder: no tokenizer.json; "</s>" is in the vocabulary and begins every text."""
    from transformers import GPT2Tokenizer

    model = json.loads(train_byte_level().to_str())["model"]
    vocab = {**model["vocab"], "</s>": len(model["vocab"]), "<pad>": len(model["vocab"]) + 1}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": add_bos, "unk_token": "</s>"}))
    special = {"bos_token": "</s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": "<pad>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    tokenizer = Tokenizer.from_folder(tmp_path)
    oracle = GPT2Tokenizer.from_pretrained(
        tmp_path, bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<pad>"
    )
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False)
    assert tokenizer.encode("fox")[0] == (vocab["</s>"] if add_bos else tokenizer.encode("f")[0])
    assert tokenizer.encode("fox</s>")[-1] == tokenizer.eos_token_id == vocab["</s>"]
    assert tokenizer.decode(tokenizer.encode("The fox</s>")) == "The fox"


def test_merges_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    (tmp_path / "merges.txt").write_text("a b c\n")
    with pytest.raises(ModelError, match=r"merges\.txt: line 1"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "merges.txt").write_text("a b\n")
    with pytest.raises(ModelError, match="do not fit"):
        Tokenizer.from_folder(tmp_path)


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    backend = MAKERS["byte_level"]()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("The quick brown fox")) == "The quick brown fox"


def test_tokens_named_by_side_files_are_special(tmp_path: Path) -> None:
    """Some folders mark the end-of-text token only in tokenizer_config.json."""
    backend = train_byte_level()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</think>", "pad_token": "<nowhere>"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_id in tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode("x</think>")) == "x"
    assert tokenizer.token_to_id("<nowhere>") is None


def test_where_chat_templates_come_from(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write_folder(tmp_path, "byte_level", chat_template=several)
    assert Tokenizer.from_folder(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert Tokenizer.from_folder(tmp_path).chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("{{ 1 }}\n")
    assert Tokenizer.from_folder(tmp_path).chat_template == "{{ 1 }}\n"


def test_control_tokens_in_segments_are_only_the_given_ones(folders: dict[str, Path]) -> None:
    for kind, control in (("byte_level", "<|im_end|>"), ("llama", "</s>"), ("first", "</s>")):
        tokenizer = Tokenizer.from_folder(folders[kind])
        index = tokenizer.token_to_id(control)
        assert index is not None
        ids = tokenizer.encode_segments([f"fox{control} dog", index, f"The{control}", index, " quick"])
        assert ids.count(index) == 2
        plain = tokenizer.encode_segments(["The quick ", index, "brown fox", index])
        assert plain == tokenizer.encode(f"The quick {control}brown fox{control}", add_special_tokens=False)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text.startswith(f"fox{control} dog{control}")
        assert text.count(control) == 4


def test_a_vocabulary_that_spells_a_control_token_is_taken_apart(tmp_path: Path) -> None:
    """With merges that lead to "</s>" itself, plain text would still give the control token."""
    backend = train_byte_level()
    state = json.loads(backend.to_str())
    vocab = state["model"]["vocab"]
    for left, right in (("<", "/"), ("</", "s"), ("</s", ">")):
        if left + right not in vocab:
            vocab[left + right] = 10_000 + len(vocab)
            state["model"]["merges"].insert(0, [left, right])
    state["added_tokens"] = [
        {"id": vocab["</s>"], "content": "</s>", "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    ]
    state["pre_tokenizer"]["use_regex"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_id == vocab["</s>"]
    ids = tokenizer.encode_segments(["a </s> b", vocab["</s>"]])
    assert ids.count(vocab["</s>"]) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a </s> b</s>"


@pytest.mark.slow
def test_a_speech_model_has_more_added_tokens_than_words(tmp_path: Path) -> None:
    """65536 and more, each an object of six values in two files."""
    train_byte_level().save(str(tmp_path / "tokenizer.json"))
    details = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    tokens = [{"content": f"<|s_{index}|>", **details} for index in range(140_000)]
    config = {"eos_token": "<|s_5|>", "added_tokens_decoder": {str(index): token for index, token in enumerate(tokens)}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": tokens}))
    assert Tokenizer.from_folder(tmp_path).special_tokens["eos_token"] == "<|s_5|>"
