"""Table H: model folders with one defect each, and what `quire serve` says of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.checkpoints import plain_tensors, safetensors_bytes, write_plain
from tests.helpers.fake_engine import CHAT_TEMPLATE, small_backend

VOCAB = 272
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
MARK = "EXECUTED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A defect.

    Attributes:
        spoil: makes it, in a good folder. words: what the line of the error must have; without any, it is served.
        options: of the command.
    """

    name: str
    what: str
    spoil: Callable[[Path], object]
    words: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def tensors() -> dict[str, np.ndarray]:
    found = plain_tensors()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found[name] = np.resize(found[name], (VOCAB, found[name].shape[1]))
    return found


def write_good(folder: Path) -> Path:
    """Write a tiny model that can be served, with a tokenizer and a chat template."""
    folder.mkdir()
    write_plain(folder, tensors(), vocab_size=VOCAB)
    small_backend().save(str(folder / "tokenizer.json"))
    write_template(folder, CHAT_TEMPLATE)
    return folder


def write_template(folder: Path, template: str, **more: Any) -> None:
    words = {"eos_token": "<|im_end|>", "unk_token": "<unk>", "chat_template": template, **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))


def config(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def weights(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        found = tensors()
        change(found)
        (folder / WEIGHTS).write_bytes(safetensors_bytes(found))

    return spoil


def raw(header: object, data: bytes = bytes(16)) -> Callable[[Path], None]:
    text = json.dumps(header).encode()
    return lambda folder: (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)


def shards(homes: dict[str, str]) -> Callable[[Path], None]:
    """Spread the weights by an index: all in one file, but for `homes`."""

    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "a.safetensors")
        every = {**dict.fromkeys(tensors(), "a.safetensors"), **homes}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": every}))

    return spoil


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return spoil


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    command = f"touch {folder / MARK}"
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'" + command.encode() + b"'\ntR.")


def with_code(*architectures: str) -> Callable[[Path], None]:
    """Put code into a folder, which every file that may name some names."""

    def spoil(folder: Path) -> None:
        (folder / "evil.py").write_text(f"open({str(folder / MARK)!r}, 'w')")
        names = {"AutoConfig": "evil.A", "AutoModelForCausalLM": "evil.A", "AutoTokenizer": ["evil.A", "evil.A"]}
        config(auto_map=names, **({"architectures": list(architectures)} if architectures else {}))(folder)
        write_template(folder, CHAT_TEMPLATE, auto_map=names, tokenizer_class="A")
        (folder / "generation_config.json").write_text(json.dumps({"custom_generate": "evil", "auto_map": names}))
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(f"open({str(folder / MARK)!r}, 'w')")

    return spoil


def template(text: str) -> Callable[[Path], None]:
    return lambda folder: write_template(folder, text.replace("MARK", str(folder / MARK)))


def not_a_number(found: dict[str, np.ndarray]) -> None:
    found[Q_PROJ][3, 5] = np.nan


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HUGE = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 40, "num_attention_heads": 64}

ROWS = [
    Folder(
        name="H1",
        what="no config.json",
        spoil=lambda folder: (folder / "config.json").unlink(),
        words=("config.json: config.json is missing",),
    ),
    Folder(
        name="H2",
        what="config.json is no JSON",
        spoil=lambda folder: (folder / "config.json").write_text('{\n  "vocab_size": 5,,\n}'),
        words=("config.json: file is not JSON", "line 2, column 19"),
    ),
    Folder(
        name="H3a",
        what="an unknown architecture",
        spoil=config(architectures=["NobodyForCausalLM"]),
        words=("config.json: architecture 'NobodyForCausalLM' is not supported", "LlamaForCausalLM"),
    ),
    Folder(
        name="H3b",
        what="an unknown type",
        spoil=config(architectures=None, model_type="nobody"),
        words=("config.json: model_type 'nobody' is not supported", "llama"),
    ),
    Folder(
        name="H4",
        what="no tokenizer",
        spoil=lambda folder: (folder / "tokenizer.json").unlink(),
        words=("tokenizer.json", "vocab.json"),
    ),
    Folder(
        name="H5",
        what="half of the weights",
        spoil=lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2),
        words=(f"{WEIGHTS}: file is truncated (expected ", "got "),
    ),
    Folder(
        name="H6",
        what="a header of 2^62 bytes",
        spoil=lambda folder: (folder / WEIGHTS).write_bytes((2**62).to_bytes(8, "little") + b"{}" * 100),
        words=(f"{WEIGHTS}: safetensors header too large", str(2**62)),
    ),
    Folder(
        name="H7a",
        what="tensors over each other",
        spoil=raw({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}),
        words=(f"{WEIGHTS}: tensor 'b'", "[4, 12] overlaps tensor 'a'"),
    ),
    Folder(
        name="H7b",
        what="tensors beyond the end",
        spoil=raw({"a": {**F32, "shape": [400], "data_offsets": [0, 1600]}}),
        words=(f"{WEIGHTS}: file is truncated", "tensor 'a'"),
    ),
    Folder(
        name="H7c",
        what="a shape of 2^66 values",
        spoil=raw({"a": {**F32, "shape": [2**33, 2**33]}}),
        words=(f"{WEIGHTS}: tensor 'a'", "do not fit shape"),
    ),
    Folder(
        name="H8",
        what="a tensor of another shape",
        spoil=weights(lambda found: found.update({Q_PROJ: found[Q_PROJ][:, 1:]})),
        words=(f"{WEIGHTS}: tensor '{Q_PROJ}' has the wrong shape (expected [32, 32], got [32, 31])",),
    ),
    Folder(
        name="H9",
        what="a missing tensor",
        spoil=weights(lambda found: found.pop(Q_PROJ)),
        words=(f"1 tensor is missing from the weights: '{Q_PROJ}'",),
    ),
    Folder(
        name="H10",
        what="a tensor too many",
        spoil=weights(lambda found: found.update({"model.vision.weight": np.zeros(3, np.float32)})),
    ),
    Folder(
        name="H11",
        what="a weight that is no number",
        spoil=weights(not_a_number),
        words=(f"{WEIGHTS}: tensor '{Q_PROJ}' holds 1 NaN or infinite values of 1024",),
    ),
    Folder(
        name="H12",
        what="a pickle",
        spoil=pickled,
        words=("pytorch_model.bin: pickle weights are not supported",),
    ),
    Folder(
        name="H13a",
        what="code of an unknown architecture",
        spoil=with_code("Evil"),
        words=("config.json: architecture 'Evil' is not supported", "auto_map"),
    ),
    Folder(name="H13b", what="code beside a known architecture", spoil=with_code()),
    Folder(
        name="H14",
        what="an unknown quantization",
        spoil=config(quantization_config={"quant_method": "banana"}),
        words=("config.json: quantization method 'banana' is not supported (supported: ",),
    ),
    Folder(
        name="H15",
        what="a missing shard",
        spoil=shards({Q_PROJ: "b.safetensors"}),
        words=("b.safetensors: no such shard", INDEX),
    ),
    Folder(
        name="H16",
        what="a shard elsewhere",
        spoil=shards({Q_PROJ: "../../etc/passwd"}),
        words=(f"{INDEX}: shard path '../../etc/passwd' escapes the model folder",),
    ),
    Folder(
        name="H17",
        what="a tokenizer with more ids than the model",
        spoil=lambda folder: write_plain(folder, vocab_size=160),
    ),
    Folder(
        name="H18a",
        what="less than no layers",
        spoil=config(num_hidden_layers=-1),
        words=("config.json: num_hidden_layers is -1 (expected an integer from 1",),
    ),
    Folder(
        name="H18b",
        what="a hidden size of 10^9",
        spoil=config(hidden_size=10**9),
        words=("config.json: hidden_size is 1000000000 (expected an integer from 1 to 1048576)",),
    ),
    Folder(
        name="H18c",
        what="heads that do not divide",
        spoil=config(num_attention_heads=5),
        words=("config.json: hidden_size is 32 (expected a multiple of num_attention_heads, 5)",),
    ),
    Folder(
        name="H19",
        what="a template with a mistake",
        spoil=template("{% for message in messages %}\n{{ message }"),
        words=("chat template", "line 2"),
    ),
    Folder(
        name="H20a",
        what="a template that reaches for the system",
        spoil=template("{{ cycler.__init__.__globals__.os.popen('touch MARK').read() }}"),
    ),
    Folder(
        name="H20b",
        what="a template that reads files",
        spoil=template("{% include '/etc/passwd' %}"),
    ),
    Folder(
        name="H20c",
        what="a template that never ends",
        spoil=template("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
    ),
    Folder(
        name="H21",
        what="a model larger than the memory",
        spoil=config(**HUGE),
        words=("the weights need", "TiB in float32", "are available"),
        options=("--load-format", "dummy"),
    ),
    Folder(
        name="H22a",
        what="a pipe as config.json",
        spoil=replaced("config.json", os.mkfifo),
        words=("config.json: is not a regular file",),
    ),
    Folder(
        name="H22b",
        what="a pipe as weights",
        spoil=replaced(WEIGHTS, os.mkfifo),
        words=(f"{WEIGHTS}: is not a regular file",),
    ),
    Folder(
        name="H22c",
        what="a folder as weights",
        spoil=replaced(WEIGHTS, os.mkdir),
        words=(f"{WEIGHTS}: is a directory",),
    ),
    Folder(
        name="H22d",
        what="a link to itself",
        spoil=replaced(WEIGHTS, lambda path: path.symlink_to(path.name)),
        words=(f"{WEIGHTS}: Too many levels of symbolic links",),
    ),
    Folder(
        name="H22e",
        what="a pipe as tokenizer",
        spoil=replaced("tokenizer.json", os.mkfifo),
        words=("tokenizer.json: is not a regular file",),
    ),
    Folder(
        name="H22f",
        what="weights that may not be read",
        spoil=lambda folder: (folder / WEIGHTS).chmod(0),
        words=(f"{WEIGHTS}: Permission denied",),
    ),
    Folder(
        name="H23",
        what="a file that gives errors",
        spoil=replaced("config.json", lambda path: path.symlink_to("/proc/self/mem")),
        words=("config.json: Input/output error",),
    ),
]
