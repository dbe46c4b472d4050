"""Hostile model folders from a seed: `make` writes number 0, 1, 2, ... of them, each with another defect.

Each begins as a good tiny model. What it would do to its reader, if it could, is create the file `MARK` in the folder
beside it: by code that a config names, a template, or a pickle.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.families import FAMILIES
from tests.helpers.adapters import factors, write_adapter
from tests.helpers.checkpoints import plain_tensors, safetensors_bytes
from tests.helpers.fake_engine import CHAT_TEMPLATE, SPECIAL, small_backend
from tests.robustness.rows.bad_folders import INDEX, VOCAB, WEIGHTS, config, tensors, write_good, write_template

SEED = 20
COUNT = 300
MARK = "EXECUTED"
MILLION = 10**6
LONG_LIST = list(range(-100_000, 0))
DEEP: Any = json.loads("[" * 500 + "]" * 500)
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Hostile:
    """What was written.

    Attributes:
        kind: the generator, such as "gguf". what: the defect. path: what a command is given for the model.
        options: of the command. adapter: the folder of an adapter that is to be loaded; else None.
    """

    number: int
    kind: str
    what: str
    path: Path
    options: tuple[str, ...] = ()
    adapter: Path | None = None


Spoil = Callable[[Path, random.Random, str], str | tuple[str, Path, tuple[str, ...]] | None]


def make(number: int, parent: Path, *, seed: int = SEED) -> Hostile:
    """Write a folder named after `number` into `parent`, which has a folder "canary" for marks."""
    rng = random.Random(f"{seed}:{number}")
    kinds = [name for name, (_, share) in KINDS.items() for _ in range(share)]
    kind = kinds[number % len(kinds)]
    folder = write_good(parent / f"{number:03}-{kind}")
    mark = str(parent / "canary" / MARK)
    said = KINDS[kind][0](folder, rng, mark)
    what, path, options = said if isinstance(said, tuple) else (str(said), folder, ())
    adapter = parent / f"{number:03}-adapter"
    return Hostile(number, kind, what, path, tuple(options), adapter if adapter.is_dir() else None)


# ---- values ----


def bad_value(rng: random.Random) -> Any:
    """Return a value that hardly any field is meant to have."""
    return rng.choice(
        [
            *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, int("9" * 4000), -(2**63), 0.5, -0.0, 1e-300),
            *(1e308, float("nan"), float("inf"), float("-inf"), "", "x", "\0", "../../etc/passwd", "a" * MILLION),
            *("\ud800", "line\nbreak\x1b[31m", [], {}, [None], [[]], LONG_LIST, DEEP, {"a": DEEP}, ["x"] * 100_000),
            *({str(key): key for key in range(20_000)}, [1e999], {"$ref": "#"}, list(range(40)), ["x" * 100_000]),
        ]
    )


def text_of(value: Any) -> bytes:
    """Return JSON as a file may hold it: with NaN, Infinity and lone surrogates."""
    return json.dumps(value).encode()


CONFIG_KEYS = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "dtype"),
    *("torch_dtype", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "hidden_act"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "auto_map"),
    *("id2label", "num_labels", "text_config", "attention_bias", "mlp_bias", "compression_config", "quire_packed"),
    *("partial_rotary_factor", "use_sliding_window", "max_window_layers", "pretraining_tp", "attention_dropout"),
)
ROPES = (
    *({"rope_type": "yarn"}, {"rope_type": "yarn", "factor": 1e300}, {"rope_type": "llama3", "factor": 0}),
    *({"rope_type": "longrope", "short_factor": LONG_LIST, "long_factor": [1.0]}, {"rope_type": "dynamic"}),
    *({"type": "linear", "factor": -1}, {"rope_type": ["yarn"]}, {"rope_type": "yarn", "factor": float("nan")}),
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0, "beta_fast": 1e308, "beta_slow": -1},
)
METHODS = ("gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4", "nobody", "", 7)


def spoil_config(folder: Path, rng: random.Random, mark: str) -> str:
    """One or more fields of config.json."""
    path = folder / "config.json"
    found = json.loads(path.read_text())
    form = rng.randrange(8)
    if form == 0:
        changes = {"architectures": [rng.choice(list(FAMILIES))], "model_type": None}
    elif form == 1:
        changes = {rng.choice(["rope_scaling", "rope_parameters"]): rng.choice(ROPES)}
    elif form == 2:
        method = {"quant_method": rng.choice(METHODS), "bits": rng.choice([4, 0, -1, 10**9, "4"])}
        keys = ("group_size", "sym", "desc_act", "version", "config_groups", "format", "modules_to_not_convert")
        changes = {"quantization_config": {**method, **{key: bad_value(rng) for key in rng.sample(keys, 3)}}}
    elif form == 3:
        sizes = ("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
        changes = {key: rng.choice([4096, 2**20, 2**27, 10**9]) for key in rng.sample(sizes, rng.randint(1, 3))}
    else:
        changes = {key: bad_value(rng) for key in rng.sample(CONFIG_KEYS, rng.choice([1, 1, 1, 2, 5]))}
    if form < 4 and rng.random() < 0.3:
        changes[rng.choice(CONFIG_KEYS)] = bad_value(rng)
    path.write_bytes(text_of({**found, **changes}))
    return f"config.json with {sorted(changes)}: {str(list(changes.values()))[:60]}"


def spoil_family(folder: Path, rng: random.Random, mark: str) -> tuple[str, Path, tuple[str, ...]]:
    """Another architecture, with dummy weights, so that its config is read to its end."""
    name = rng.choice([name for name in FAMILIES if name != "LlamaForCausalLM"])
    found = {**json.loads((folder / "config.json").read_text()), "architectures": [name], "model_type": None}
    found |= {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 256, "layer_norm_eps": 1e-5}
    family = FAMILIES[name]
    keys = [*family.defaults, *CONFIG_KEYS]
    changes = {key: bad_value(rng) for key in rng.sample(keys, min(len(keys), rng.randint(0, 2)))}
    options = ("--load-format", "dummy")
    if rng.random() < 0.4:
        options = ("--model-impl", "transformers")
        kind = rng.choice(["llama", "llama", "gpt2", "t5", "clip"])
        found |= {"architectures": ["LlamaForCausalLM"], "model_type": kind}
    (folder / "config.json").write_bytes(text_of({**found, **changes}))
    return f"{name} with {sorted(changes)}", folder, options


def spoil_json(folder: Path, rng: random.Random, mark: str) -> str:
    """The bytes of a JSON file, whatever it says."""
    name = rng.choice(["config.json", "config.json", "generation_config.json", "tokenizer_config.json", INDEX])
    name = rng.choice([name, "tokenizer.json", "special_tokens_map.json"])
    path = folder / name
    good = path.read_bytes() if path.exists() else b'{"a": 1}'
    if name == INDEX:
        (folder / WEIGHTS).unlink()
    forms: dict[str, Callable[[], bytes]] = {
        "nothing": lambda: b"",
        "nested objects": lambda: b'{"a":' * MILLION,
        "nested lists": lambda: good[:-1] + b',"deep":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "900 levels": lambda: good[:-1] + b',"deep":' + b"[" * 900 + b"]" * 900 + b"}",
        "50 MB of numbers": lambda: good[:-1] + b',"x":[' + b"1," * 25_000_000 + b"1]}",
        "50 MB of text": lambda: good[:-1] + b',"x":"' + b"x" * 50_000_000 + b'"}',
        "50 MB of keys": lambda: good[:-1] + b"".join(b',"k%07d":{}' % key for key in range(3_500_000)) + b"}",
        "65 MB": lambda: good + b" " * 65_000_000,
        "latin-1": lambda: good[:-1] + ',"x":"\xe9\xff"}'.encode("latin-1"),
        "utf-16": lambda: good.decode().encode("utf-16"),
        "byte order mark": lambda: b"\xef\xbb\xbf" + good,
        "NUL": lambda: good + b"\0",
        "a key twice": lambda: good[:-1] + b',"vocab_size":272,"vocab_size":5}',
        "a long key twice": lambda: good[:-1] + (b',"' + b"k" * MILLION + b'":1') * 2 + b"}",
        "a million digits": lambda: good[:-1] + b',"x":' + b"9" * MILLION + b"}",
        "a list": lambda: b"[" + good + b"]",
        "a number": lambda: b"1e999",
        "cut": lambda: good[: rng.randrange(len(good))],
        "noise": lambda: rng.randbytes(1000),
        "flipped": lambda: _flipped(good, rng),
    }
    form = rng.choice(list(forms))
    path.write_bytes(forms[form]())
    return f"{name}: {form}"


def _flipped(data: bytes, rng: random.Random, count: int = 8) -> bytes:
    changed = bytearray(data)
    for _ in range(count):
        changed[rng.randrange(len(changed))] = rng.choice([0, 34, 44, 48, 57, 91, 123, 125, 128, 255])
    return bytes(changed)


def spoil_files(folder: Path, rng: random.Random, mark: str) -> str:
    """Something else in a file's place."""
    name = rng.choice(["config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
    name = rng.choice([name, name, "chat_template.jinja", "special_tokens_map.json", "chat_template.json", INDEX])
    name = rng.choice([name, name, name, "modules.json", "config_sentence_transformers.json", "quire.packed"])
    path = folder / name
    if path.exists():
        path.unlink()
    secret = Path(mark).with_name("secret")
    forms: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "socket": lambda: _listen(path),
        "link to itself": lambda: path.symlink_to(path.name),
        "link to nothing": lambda: path.symlink_to("nothing"),
        "link to /": lambda: path.symlink_to("/"),
        "link out of the folder": lambda: path.symlink_to(secret),
        **{
            f"link to {target}": lambda target=target: path.symlink_to(target)
            for target in ("/dev/zero", "/dev/full", "/dev/stdin", "/dev/tty", "/proc/self/mem", "/proc/self/environ")
        },
        "empty": path.touch,
        "absent": lambda: None,
        "sparse": lambda: _sparse(path, b"{}", 2**40),
    }
    form = rng.choice(list(forms))
    forms[form]()
    return f"{name}: {form}"


def _listen(path: Path) -> None:
    """Leave a socket in the file system; its name may be longer than an address may be."""
    here = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


def _sparse(path: Path, start: bytes, size: int) -> None:
    path.write_bytes(start)
    try:
        os.truncate(path, size)
    except OSError:  # a file system with smaller files
        os.truncate(path, 2**33)


def spoil_generation(folder: Path, rng: random.Random, mark: str) -> str:
    """generation_config.json."""
    keys = ("temperature", "top_p", "top_k", "repetition_penalty", "eos_token_id", "bos_token_id", "max_new_tokens")
    changes = {key: bad_value(rng) for key in rng.sample(keys, rng.randint(1, 3))}
    changes |= {"custom_generate": "evil", "transformers_version": bad_value(rng)}
    (folder / "generation_config.json").write_bytes(text_of(changes))
    return f"generation_config.json with {sorted(changes)}"


def spoil_code(folder: Path, rng: random.Random, mark: str) -> str:
    """Python files, which everything that can names."""
    code = f"open({mark!r}, 'w')\n"
    for name in ("evil", "modeling_llama", "tokenizers", "json", "numpy", "torch", "sitecustomize", "conftest"):
        (folder / f"{name}.py").write_text(code)
    (folder / "__init__.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    (folder / "requirements.txt").write_text("evil==1.0\n")
    names = {"AutoConfig": "evil.A", "AutoModelForCausalLM": "evil.A", "AutoTokenizer": ["evil.A", None]}
    odd = rng.choice([names, "evil.A", [], {"AutoConfig": "http://127.0.0.1:9/evil--evil.A"}, {"AutoModel": LONG_LIST}])
    name = rng.choice(["LlamaForCausalLM", "Evil", "evil.Evil"])
    config(auto_map=odd, architectures=[name], trust_remote_code=True, _name_or_path="http://127.0.0.1:9/x")(folder)
    write_template(folder, CHAT_TEMPLATE, auto_map=odd, tokenizer_class="evil.A", tokenizer_file="/etc/passwd")
    return f"code of {name}: {str(odd)[:60]}"


# ---- tokenizers and templates ----


def spoil_tokenizer(folder: Path, rng: random.Random, mark: str) -> str:
    """A field of tokenizer.json, at any depth, or what stands in its place."""
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    form = rng.randrange(10)
    if form < 5:
        what = []
        for _ in range(rng.choice([1, 1, 2, 4])):
            at, place = found, []
            while True:
                key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
                place.append(key)
                if not (isinstance(at[key], dict | list) and at[key] and rng.random() < 0.7):
                    break
                at = at[key]
            at[key] = bad_value(rng)
            what.append(".".join(map(str, place)))
            if not isinstance(found, dict) or not found:
                break
        path.write_bytes(text_of(found))
        return f"tokenizer.json: {what}"
    if form == 5:
        found["added_tokens"] = [
            {**item, "id": rng.choice([-1, 2**31, 2**32, 2**63, 0])} for item in found["added_tokens"]
        ]
        path.write_bytes(text_of(found))
        return "tokenizer.json: ids of added tokens"
    if form == 6:
        found["model"]["vocab"] = {text: rng.choice([0, 2**32 - 1, 2**31]) for text in found["model"]["vocab"]}
        path.write_bytes(text_of(found))
        return "tokenizer.json: ids of the vocabulary"
    if form == 7:
        pattern = rng.choice(["(a+)+$", "(", "[" * 1000, "(?=" * 500, "a{1000}{1000}{1000}", "", ".*" * 1000])
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        found[rng.choice(["pre_tokenizer", "normalizer"])] = split
        path.write_bytes(text_of(found))
        return f"tokenizer.json: pattern {pattern[:20]}"
    if form == 8:
        nested: Any = {"type": "Sequence", "pretokenizers": []}
        for _ in range(rng.choice([3, 100, 120, 5000])):
            nested = {"type": "Sequence", "pretokenizers": [nested]}
        path.write_bytes(_nested_text({**found, "pre_tokenizer": "PLACE"}, nested))
        return "tokenizer.json: nested sequences"
    path.unlink()
    vocab = {text: index for index, text in enumerate([*SPECIAL, *"abc"])}
    old = rng.choice(["vocab", "merges", "words", "model"])
    if old == "words":
        (folder / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n" + rng.choice(["", "\n" * 10**5, "\0", "x" * MILLION]))
    elif old == "model":
        (folder / "tokenizer.model").write_bytes(rng.randbytes(1000))
    else:
        changed = {**vocab, "x": bad_value(rng)} if old == "vocab" else vocab
        (folder / "vocab.json").write_bytes(text_of(changed))
        lines = rng.choice(["a", "a b c", "a z", "\n" * 10**5, "\0 \0", "a b\n" * 10**5])
        (folder / "merges.txt").write_text(lines if old == "merges" else "a b\n")
    return f"an older tokenizer: {old}"


def _nested_text(found: dict[str, Any], nested: Any) -> bytes:
    """Return JSON that Python itself could not write, with `nested` in the place of "PLACE"."""
    ends: list[str] = []
    text = ""
    while nested["pretokenizers"]:
        text, nested = text + '{"type":"Sequence","pretokenizers":[', nested["pretokenizers"][0]
        ends.append("]}")
    return json.dumps(found).replace('"PLACE"', text + json.dumps(nested) + "".join(ends)).encode()


def spoil_tokenizer_config(folder: Path, rng: random.Random, mark: str) -> str:
    """tokenizer_config.json and special_tokens_map.json."""
    keys = (
        *("bos_token", "eos_token", "unk_token", "pad_token", "add_bos_token", "chat_template", "model_max_length"),
        *("extra_special_tokens", "additional_special_tokens", "added_tokens_decoder", "tokenizer_class"),
    )
    changes = {key: bad_value(rng) for key in rng.sample(keys, rng.randint(1, 3))}
    if rng.random() < 0.3:
        (folder / "special_tokens_map.json").write_bytes(text_of(changes))
        (folder / "tokenizer_config.json").unlink()
    else:
        words = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE, **changes}
        (folder / "tokenizer_config.json").write_bytes(text_of(words))
    return f"tokenizer_config.json with {sorted(changes)}"


TEMPLATES = (
    "{{ cycler.__init__.__globals__.os.popen('touch MARK').read() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ self.__init__.__globals__['__builtins__']['open']('MARK', 'w') }}",
    "{% for c in [].__class__.__base__.__subclasses__() %}{{ c.__init__.__globals__ }}{% endfor %}",
    "{{ lipsum.__globals__.os.system('touch MARK') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch MARK') }}",
    "{% extends 'http://127.0.0.1:9/' %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set x = 'a' * 10**9 %}{{ x * 10**9 }}",
    "{{ range(10**12) | list | length }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 300000000 | round(300000000, 'ceil') }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{{ 'x' | center(10**9) }}",
    "{{ messages.append(messages) or messages }}",
    "{% set ns = namespace(l=[0]) %}{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l == ns.l }}",
    "{{ message }",
    "{% if %}",
    "{{ raise_exception('no\nno\x1b[31m') }}",
    "{{ raise_exception('x' * 100000) }}",
    "(" * 5000 + "x" + ")" * 5000,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "-" * 20000 + "1 }}",
    "{% if true %}" * 200 + "{% endif %}" * 200,
    "{{ undefined.x.y }}",
    "{{ messages[10**30] }}",
    "\ud800",
    "x" * (2**20 + 1),
    "{# " + "x" * 10**6,
    "{{ 'a' | tojson(indent=10**9) }}",
    "{{ ['a'] * 10**9 }}",
    "{{ dict() | urlize }}{{ 'x' | map('attr', '__class__') }}",
)


def spoil_template(folder: Path, rng: random.Random, mark: str) -> str:
    """A chat template, at one of the places where it may stand."""
    text = rng.choice(TEMPLATES).replace("MARK", mark)
    place = rng.randrange(5)
    if place == 0:
        (folder / "chat_template.jinja").write_bytes(text.encode("utf-8", "surrogatepass"))
    elif place == 1:
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    elif place == 2:
        named = [{"name": name, "template": text} for name in ("default", "tool_use")]
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": named}))
    else:
        write_template(folder, text)
    return f"template {text[:50]!r} at {place}"


# ---- weights ----

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def spoil_safetensors(folder: Path, rng: random.Random, mark: str) -> str:
    """Header, layout or values of model.safetensors."""
    path = folder / WEIGHTS
    good = path.read_bytes()
    size = int.from_bytes(good[:8], "little")
    header, data = json.loads(good[8 : 8 + size]), good[8 + size :]
    name = rng.choice(list(header))
    entry = header[name]
    form = rng.randrange(16)
    if form == 0:
        length = rng.choice([0, 1, size - 1, size + 1, len(good), 10**8, 10**8 + 1, 2**62, 2**64 - 1])
        path.write_bytes(length.to_bytes(8, "little") + good[8:])
        return f"header of {length} bytes"
    if form == 1:
        path.write_bytes(good[: rng.choice([0, 4, 8, 9, 8 + size, 9 + size, len(good) - 1, len(good) // 2])])
        return "truncated"
    if form == 2:
        _sparse(path, good, rng.choice([2**40, 2**36]))
        return "sparse"
    if form == 3:
        _sparse(path, (10**8).to_bytes(8, "little") + b"{", 2**40)
        return "sparse, with a header of 100 MB"
    if form == 4:
        many = {f"t{number}": {**F32, "data_offsets": [8 * number, 8 * number + 8]} for number in range(100_000)}
        text = json.dumps(many).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(800_000))
        return "100,000 other tensors"
    if form == 5:
        text = json.dumps(header)[:-1] + f', "{name}": {json.dumps(entry)}}}'
        path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data)
        return "a tensor twice"
    if form == 6:
        (folder / "model-2.safetensors").write_bytes(good)
        path.rename(folder / "model-1.safetensors")
        return "all tensors twice"
    if form == 7:
        found = tensors()
        del found[name]
        path.write_bytes(safetensors_bytes(found))
        return "a missing tensor"
    if form == 8:
        found = tensors()
        found[name] = rng.choice([found[name].reshape(-1)[:-1], found[name][None], found[name].reshape(-1)[:0]])
        path.write_bytes(safetensors_bytes(found))
        return "a wrong shape"
    if form == 9:
        found = tensors()
        found[name].reshape(-1)[rng.randrange(found[name].size)] = rng.choice([np.nan, np.inf, -np.inf, 3e38])
        path.write_bytes(safetensors_bytes(found))
        return "not finite, or nearly"
    if form == 10:
        path.write_bytes(good[:8] + _flipped(good[8 : 8 + size], rng) + data)
        return "flipped header"
    begin, end = entry["data_offsets"]
    if form == 11:
        entry["data_offsets"] = rng.choice(
            [[end, begin], [0, end - begin], [-1, end], [begin, 2**64], [begin], LONG_LIST]
        )
    elif form == 12:
        entry["data_offsets"] = [2**62 + begin, 2**62 + end]
    elif form == 13:
        entry["dtype"] = rng.choice(["F64", "I64", "U16", "BOOL", "C64", "F8_E4M3", "Q4_K", "", bad_value(rng)])
    elif form == 14:
        entry["shape"] = rng.choice([[2**33, 2**33], [-1, -1], [], [1] * 100_000, [0], [0.5], bad_value(rng)])
    else:
        header[rng.choice([name, "__metadata__", "x"])] = bad_value(rng)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return f"entry {name}: {str(entry)[:60]}"


def spoil_index(folder: Path, rng: random.Random, mark: str) -> tuple[str, Path, tuple[str, ...]]:
    """model.safetensors.index.json, or that of pickles."""
    names = list(tensors())
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    every: Any = dict.fromkeys(names, "a.safetensors")
    secret = str(Path(mark).with_name("secret.safetensors"))
    homes = (
        *("../canary/secret.safetensors", secret, "..", ".", "", "a.safetensors/", "b.safetensors", "/dev/zero"),
        *("a\0.safetensors", "~/secret.safetensors", "http://127.0.0.1:9/a.safetensors", "x" * 5000, INDEX, 7, None),
        *(["a.safetensors"], "config.json", "loop.safetensors", "out.safetensors", "pipe.safetensors"),
    )
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "out.safetensors").symlink_to(secret)
    os.mkfifo(folder / "pipe.safetensors")
    home = rng.choice(homes)
    form = rng.randrange(6)
    if form == 0:
        every = rng.choice(
            [{}, [], None, LONG_LIST, {"x": "a.safetensors"}, {str(key): str(key) for key in range(10**5)}]
        )
    elif form == 1:
        every = dict.fromkeys(names, home)
    else:
        every[rng.choice(names)] = home
    options: tuple[str, ...] = ()
    index = folder / INDEX
    if rng.random() < 0.2:
        index, options = folder / "pytorch_model.bin.index.json", ("--load-format", "pt")
    index.write_bytes(text_of({"metadata": bad_value(rng), "weight_map": every}))
    return f"index: {str(home)[:40]} in form {form}", folder, options


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _pair(key: str, kind: int, value: bytes) -> bytes:
    return _text(key.encode()) + struct.pack("<I", kind) + value


def _strings(values: list[str]) -> bytes:
    return struct.pack("<IQ", 8, len(values)) + b"".join(_text(value.encode()) for value in values)


@cache
def gguf_parts() -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
    """Return the metadata, as bytes, and the tensors of a good GGUF file of the same tiny model."""
    model = json.loads(small_backend().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens += [f"unused{number}" for number in range(VOCAB - len(tokens))]
    merges = [item if isinstance(item, str) else " ".join(item) for item in model["merges"]]
    numbers = {"block_count": 2, "embedding_length": 32, "attention.head_count": 4, "feed_forward_length": 48}
    numbers |= {"context_length": 256}
    pairs = {"general.architecture": _pair("general.architecture", 8, _text(b"llama"))}
    pairs |= {f"llama.{key}": _pair(f"llama.{key}", 4, struct.pack("<I", value)) for key, value in numbers.items()}
    key = "llama.attention.layer_norm_rms_epsilon"
    pairs[key] = _pair(key, 6, struct.pack("<f", 1e-5))
    for key, value in {"model": "gpt2", "pre": "gpt-2"}.items():
        pairs[f"tokenizer.ggml.{key}"] = _pair(f"tokenizer.ggml.{key}", 8, _text(value.encode()))
    for key, values in {"tokens": tokens, "merges": merges}.items():
        pairs[f"tokenizer.ggml.{key}"] = _pair(f"tokenizer.ggml.{key}", 9, _strings(values))
    pairs["tokenizer.ggml.eos_token_id"] = _pair("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", 2))
    pairs["tokenizer.chat_template"] = _pair("tokenizer.chat_template", 8, _text(CHAT_TEMPLATE.encode()))
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "model.norm.weight": "output_norm.weight",
    }
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    parts |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    parts |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for layer in range(2):
        names |= {f"model.layers.{layer}.{old}.weight": f"blk.{layer}.{new}.weight" for old, new in parts.items()}
    return pairs, {names[name]: value for name, value in tensors().items()}


def gguf_bytes(
    pairs: dict[str, bytes],
    entries: list[tuple[str, tuple[int, ...], int, int]],
    data: bytes,
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
) -> bytes:
    """Return a file: entries are name, sizes, type and offset."""
    tensor_count, pair_count = counts or (len(entries), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count) + b"".join(pairs.values())
    for name, sizes, kind, offset in entries:
        head += _text(name.encode()) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return head + bytes(-len(head) % 32) + data


def spoil_gguf(folder: Path, rng: random.Random, mark: str) -> tuple[str, Path, tuple[str, ...]]:
    """A GGUF file, given by its path or as the only weights of a folder."""
    for path in folder.iterdir():
        path.unlink()
    found, weights = gguf_parts()
    pairs, entries, data = dict(found), [], b""
    for name, array in weights.items():
        entries.append((name, array.shape[::-1], 0, len(data)))
        data += array.astype("<f4").tobytes()
        data += bytes(-len(data) % 32)
    counts, version = None, 3
    huge = rng.choice([2**31, 2**40, 2**63, 2**64 - 1])
    at = rng.randrange(len(entries))
    name, sizes, kind, offset = entries[at]
    form = rng.randrange(15)
    key = rng.choice([key for key in pairs if key != "general.architecture"])
    what = f"form {form}"
    if form == 0:
        counts = rng.choice([(huge, len(pairs)), (len(entries), huge), (0, 0), (len(entries) + 1, len(pairs))])
    elif form == 1:
        pairs[key] = _pair(key, 8, struct.pack("<Q", huge) + b"x")
    elif form == 2:
        inner = rng.choice([8, 9, 4, 13, 12, 0])
        pairs[key] = _pair(key, 9, struct.pack("<IQ", inner, huge))
    elif form == 3:
        pairs[key] = _pair(key, rng.choice([13, 255, 2**32 - 1]), b"")
    elif form == 4:
        other = rng.choice([(4, struct.pack("<I", 2**32 - 1)), (6, struct.pack("<f", float("nan"))), (7, b"\x02")])
        pairs[key] = _pair(key, *rng.choice([other, (8, _text(b"x" * 10**6)), (9, _strings(["x"] * 10**5))]))
        what = f"another {key}"
    elif form == 5:
        entries[at] = (name, sizes, rng.choice([1, 2, 8, 12, 14, 16, 30, 99, 2**32 - 1]), offset)
    elif form == 6:
        entries[at] = (name, sizes, kind, rng.choice([huge - huge % 32, offset + 1, 0, len(data)]))
    elif form == 7:
        entries[at] = (
            name,
            rng.choice([(huge,), (2**40, 2**40), (0, 4), (32,), (1, 1, 1, 1024), sizes[::-1]]),
            kind,
            offset,
        )
    elif form == 8:
        entries.append(rng.choice([entries[0], ("x" * 70_000, (32,), 0, 0), ("output.bias", (32,), 0, 0)]))
    elif form == 9:
        del entries[at]
    elif form == 10:
        del pairs[key]
        what = f"no {key}"
    elif form == 11:
        pairs["split.count"] = _pair("split.count", 2, struct.pack("<H", rng.choice([2, 1000, 65535])))
    elif form == 12:
        version = rng.choice([0, 1, 4, 3 << 24, 2**32 - 1])
    elif form == 13:
        value = rng.choice([0, 1, 33, 2**31])
        pairs["general.alignment"] = _pair("general.alignment", 4, struct.pack("<I", value))
    content = gguf_bytes(pairs, entries, data, counts=counts, version=version)
    if form == 14:
        head = len(content) - len(data)
        content = _flipped(content[:head], rng, 4) + content[head:]
        if rng.random() < 0.5:
            content = content[: rng.randrange(len(content))]
    path = folder / "m.gguf"
    path.write_bytes(content)
    if rng.random() < 0.1:
        _sparse(path, content, 2**40)
        what += ", sparse"
    return f"GGUF, {what}", rng.choice([path, folder]), ()


def spoil_pickle(folder: Path, rng: random.Random, mark: str) -> tuple[str, Path, tuple[str, ...]]:
    """Pickles that would run a command."""
    (folder / WEIGHTS).unlink()
    command = f"touch {mark}".encode()
    evil = b"cos\nsystem\n(S'" + command + b"'\ntR."
    builtin = b"cbuiltins\nexec\n(S'open(\"" + mark.encode() + b'", "w")\'\ntR.'
    name = rng.choice(["pytorch_model.bin", "model.pt", "weights.pth", "x.ckpt", "x.pkl", "model.safetensors"])
    path = folder / name
    form = rng.randrange(8)
    content = rng.choice([evil, builtin])
    if form < 3:
        path.write_bytes(b"\x80\x02" + content if form else content)
    elif form == 3:
        _zipped(path, content)
    elif form == 4:
        _zipped(path, b"\x80\x02}q\x00.", size=2**31)
    elif form == 5:
        path.write_bytes(b"PK\x03\x04" + rng.randbytes(2000))
    elif form == 6:
        path.write_bytes(b"\x80\x02" + b"(" * 10**6 + b".")
    else:
        path.write_bytes(b"\x80\x02\x8c\xff" + b"X\xff\xff\xff\x7f" + b"x")
    options = ("--load-format", "pt") if rng.random() < 0.8 else ()
    return f"{name}: pickle {form}", folder, options


def _zipped(path: Path, content: bytes, size: int = 0) -> None:
    import zipfile

    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if size else zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
        if size:  # much from little
            with archive.open("archive/data/0", "w", force_zip64=True) as member:
                for _ in range(8):
                    member.write(bytes(2**23))


def spoil_adapter(folder: Path, rng: random.Random, mark: str) -> str:
    """A PEFT adapter; the model is good."""
    base = plain_tensors()
    made = factors(base, ["q_proj", "v_proj"], rank=4, seed=0)
    adapter = write_adapter(folder.with_name(folder.name.replace("-adapter", "") + "-adapter"), made)
    adapter = adapter.rename(folder.parent / f"{folder.name[:3]}-adapter")
    path, file = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    fields = json.loads(path.read_text())
    form = rng.randrange(6)
    if form < 3:
        keys = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "modules_to_save", "peft_type")
        more = ("layers_to_transform", "layers_pattern", "bias", "use_dora", "exclude_modules", "auto_mapping")
        changes = {key: bad_value(rng) for key in rng.sample((*keys, *more), rng.choice([1, 1, 2]))}
        if form == 1:
            pattern = rng.choice(["(a+)+$", "(.*)*x", "(" * 500, "a{9999}{9999}", ".*" * 500 + "x", "((a|a)*)*b"])
            pattern = rng.choice([pattern, "(?:.*(?<!x))" * 150, "(?i:[\\0-\U0010fffe])" * 98])
            changes = {rng.choice(["target_modules", "exclude_modules"]): pattern}
            if rng.random() < 0.5:
                changes = {"rank_pattern": {f"{pattern}{number}": 4 for number in range(rng.choice([1, 2048]))}}
        changes |= {"base_model_name_or_path": "http://127.0.0.1:9/x", "auto_mapping": {"base_model_class": "evil"}}
        path.write_bytes(text_of({**fields, **changes}))
        return f"adapter with {str(changes)[:80]}"
    if form == 3:
        file.unlink()
        rng.choice(
            [lambda: os.mkfifo(file), file.mkdir, lambda: file.symlink_to("/dev/zero"), file.touch, lambda: None]
        )()
        (adapter / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + mark.encode() + b"'\ntR.")
        return "adapter without weights"
    if form == 4:
        scratch = folder / "scratch"
        scratch.mkdir()
        shutil.copy(file, scratch / WEIGHTS)
        try:
            what = spoil_safetensors(scratch, rng, mark)
            if (scratch / WEIGHTS).exists():
                (scratch / WEIGHTS).replace(file)
        finally:
            shutil.rmtree(scratch)
        return f"adapter: {what}"
    path.unlink()
    rng.choice([lambda: os.mkfifo(path), path.mkdir, path.touch, lambda: path.symlink_to("/dev/zero"), lambda: None])()
    return "adapter without config"


# kind -> generator, how many of 60
KINDS: dict[str, tuple[Spoil, int]] = {
    "config": (spoil_config, 11),
    "safetensors": (spoil_safetensors, 8),
    "gguf": (spoil_gguf, 8),
    "tokenizer": (spoil_tokenizer, 6),
    "template": (spoil_template, 5),
    "adapter": (spoil_adapter, 5),
    "json": (spoil_json, 4),
    "files": (spoil_files, 4),
    "index": (spoil_index, 3),
    "pickle": (spoil_pickle, 2),
    "family": (spoil_family, 2),
    "code": (spoil_code, 1),
    "generation": (spoil_generation, 1),
}
KINDS["tokenizer_config"] = (spoil_tokenizer_config, 1)
