"""Measures every family against transformers and writes the tables of docs/models.md: `python -m tests.parity.table`.

With names of architectures, only their rows are measured again; with `formats`, only the table of formats, whose
measuring is in format_table.py. Nothing in a row is typed in.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire import LLM, SamplingParams
from quire.checkpoint.families import FAMILIES
from quire.checkpoint.hf_config import load_model_info
from quire.kernels.create import create_backend
from quire.models.loader import load_model
from tests.helpers.checkpoints import load_oracle, logits_of, write_checkpoint
from tests.helpers.model_driver import ModelDriver
from tests.parity import test_pooling as pooling
from tests.parity.cases.case import Case
from tests.parity.cases.every import EVERY
from tests.parity.format_table import HEAD as FORMATS_HEAD
from tests.parity.format_table import format_rows
from tests.parity.harness import largest_error, tokens

DOC = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: python -m tests.parity.table -->", "<!-- end of families -->"
POOLING_BEGIN, POOLING_END = "<!-- pooling: python -m tests.parity.table -->", "<!-- end of pooling -->"
FORMATS = "formats"  # a name that stands for their table
FORMATS_BEGIN, FORMATS_END = "<!-- formats: python -m tests.parity.table formats -->", "<!-- end of formats -->"
POOLING_HEAD = (
    "| architecture | file | shapes | output | error | alone as beside others |",
    "| --- | --- | ---: | --- | ---: | --- |",
)
HEAD = (
    "| architecture | file | shapes | float32 | greedy 64 | bfloat16 | chunks, prefixes | int8 | int4 |",
    "| --- | --- | ---: | ---: | --- | ---: | --- | ---: | ---: |",
)


@dataclass
class Measured:
    """One case. Errors are largest differences of logits, as a share of the largest logit.

    Those of packed weights are against float32, and (_same) against the reference backend with weights so rounded.
    """

    float32: float
    greedy: bool
    bfloat16: float
    bfloat16_theirs: float
    equal: bool
    cached: bool
    int8: float
    int8_same: float
    int4: float
    int4_same: float


def architectures() -> list[str]:
    """Return the architectures that write texts, in the order of the tables of families."""
    return [name for name, family in FAMILIES.items() if family.pools is None]


def cases_of(architecture: str) -> dict[str, Case]:
    """Return the parity cases of an architecture: those whose family is its model_type."""
    model_type = FAMILIES[architecture].model_type
    return {name: case for name, case in EVERY.items() if case[0] == model_type}


def main(names: list[str]) -> None:
    """Measure `names`, or all, and write their rows."""
    if not names or FORMATS in names:
        lines = list(FORMATS_HEAD)
        for line in format_rows():
            print(line, file=sys.stderr, flush=True)
            lines.append(line)
        write(FORMATS_BEGIN, lines, FORMATS_END)
    rows = dict(rows_of(DOC.read_text("utf-8")))
    for architecture in [name for name in names if name != FORMATS] if names else architectures():
        rows[architecture] = row(architecture)
        print(rows[architecture], file=sys.stderr, flush=True)
        write(BEGIN, [*HEAD, *(rows[name] for name in architectures() if name in rows)], END)
    if not names:
        write(POOLING_BEGIN, [*POOLING_HEAD, *pooling_rows()], POOLING_END)


def write(begin: str, lines: list[str], end: str) -> None:
    """Put lines between two marks of docs/models.md."""
    before, _, rest = DOC.read_text("utf-8").partition(begin)
    DOC.write_text(before + "\n".join([begin, *lines, end]) + rest.partition(end)[2], "utf-8")


def rows_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield architecture and line of each row of the table in docs/models.md."""
    for line in text.partition(BEGIN)[2].partition(END)[0].splitlines():
        found = re.match(r"\| `(\w+)`", line)
        if found:
            yield found[1], line


def row(architecture: str) -> str:
    """Measure all cases of an architecture; return a line with the worst of each."""
    measured = [measure(name) for name in cases_of(architecture)]

    def worst(key: str, digits: str) -> str:
        return format(max(getattr(case, key) for case in measured), digits)

    def all_of(key: str) -> str:
        failed = sum(not getattr(case, key) for case in measured)
        return f"no ({failed} of {len(measured)})" if failed else "yes"

    cells = [
        f"`{architecture}`",
        file_of(architecture),
        str(len(measured)),
        worst("float32", ".1e"),
        all_of("greedy"),
        f"{worst('bfloat16', '.1%')} ({worst('bfloat16_theirs', '.1%')})",
        all_of("equal") + ("" if all_of("cached") == "yes" else ", none cached"),
        f"{worst('int8', '.0%')}, {worst('int8_same', '.0e')}",
        f"{worst('int4', '.0%')}, {worst('int4_same', '.0e')}",
    ]
    return f"| {' | '.join(cells)} |"


def file_of(architecture: str) -> str:
    """Return the file of `quire.models` that has an architecture's options."""
    return f"`{FAMILIES[architecture].options.partition('.')[0]}.py`"


def measure(case: str) -> Measured:
    """Write the checkpoints of a case, run all that the table shows, and throw them away."""
    family, config = EVERY[case]
    with tempfile.TemporaryDirectory() as folder:
        plain = write_checkpoint(Path(folder) / "float32", family, seed=len(case), **config)
        half = write_checkpoint(Path(folder) / "bfloat16", family, seed=len(case), dtype="bfloat16", **config)
        oracle, prompt, start = load_oracle(plain), tokens(41), tokens(7, seed=2)
        truth = logits_of(oracle, prompt)
        ours = driver(plain)
        logits = ours.step({"whole": prompt})["whole"]
        text = ours.greedy(start, 64)
        choices = logits_of(oracle, start + text)[len(start) - 1 : -1].argmax(axis=1).tolist()
        half_truth = logits_of(load_oracle(half), prompt)
        halves = driver(half, "bfloat16").step({"whole": prompt})["whole"]
        int8, int4, rounded8, rounded4 = (
            driver(plain, device=device, quantization=kind).step({"whole": prompt})["whole"]
            for device in ("cpu", "reference")
            for kind in ("int8", "int4")
        )
        equal, cached = same_on_every_road(plain)
        return Measured(
            float32=largest_error(logits, truth),
            greedy=text == choices,
            bfloat16=largest_error(halves, half_truth),
            bfloat16_theirs=largest_error(logits_of(load_oracle(half, "bfloat16"), prompt), half_truth),
            equal=equal,
            cached=cached,
            int8=largest_error(int8, logits),
            int8_same=largest_error(int8, rounded8),
            int4=largest_error(int4, logits),
            int4_same=largest_error(int4, rounded4),
        )


def driver(
    folder: Path, dtype: str = "float32", *, device: str = "cpu", quantization: str | None = None
) -> ModelDriver:
    """Load a model."""
    backend = create_backend(device, dtype, dtype, num_threads=1, quantization=quantization)
    return ModelDriver(load_model(load_model_info(folder), backend), backend)


def same_on_every_road(folder: Path) -> tuple[bool, bool]:
    """Return whether the engine gives the same tokens and the very same log-probabilities on three roads.

    A prompt goes in at once; in chunks of 16 tokens; and, a second time, behind the part of it that is cached. The
    second answer is whether any of it was.
    """
    prompt = {"prompt_token_ids": tokens(60, seed=4)}
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2, ignore_eos=True)
    answers: list[Any] = []
    for options in ({"enable_prefix_caching": False}, {"max_num_batched_tokens": 16}):
        llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            device="cpu",
            dtype="float32",
            num_threads=1,
            num_gpu_blocks_override=64,
            **options,
        )
        answers += [llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2)]
        llm.close()
    whole, _, chunked, cached = answers
    told = [(answer.outputs[0].token_ids, answer.outputs[0].logprobs) for answer in (whole, chunked, cached)]
    return told[0] == told[1] == told[2], bool(cached.num_cached_tokens)


def pooling_rows() -> Iterator[str]:
    """Measure the models of vectors and of scores, and yield a line for each architecture."""
    for output, cases in (("vector", pooling.EMBEDDERS), ("scores", pooling.CLASSIFIERS)):
        for architecture in dict.fromkeys(architecture for architecture, _ in cases.values()):
            shapes = [name for name, case in cases.items() if case[0] == architecture]
            measured = [measure_pooling(architecture, name, cases[name][1], output) for name in shapes]
            cells = [
                f"`{architecture}`",
                file_of(architecture),
                str(len(shapes)),
                output,
                format(max(worst for worst, _ in measured), ".1e"),
                "yes" if all(equal for _, equal in measured) else "no",
            ]
            yield f"| {' | '.join(cells)} |"


def measure_pooling(architecture: str, name: str, config: dict[str, Any], output: str) -> tuple[float, bool]:
    """Return the error of vectors (or logits of classes), and whether a text alone gets the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        written = pooling.write_model(Path(folder), architecture, **config)
        oracle = pooling.load_oracle(written, architecture)
        params = None if output == "vector" else pooling.RAW
        with pooling.open_llm(written) as llm:
            together = pooling.data(llm, pooling.TEXTS, params)
            alone = [pooling.data(llm, [text], params)[0] for text in pooling.TEXTS]
        wanted = [expected_of(oracle, name, text, output) for text in pooling.TEXTS]
    equal = all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))
    return largest_error(np.stack(together), np.stack(wanted)), equal


def expected_of(oracle: Any, name: str, text: list[int], output: str) -> np.ndarray:
    """Return what transformers makes of a text."""
    if output == "scores":
        return pooling.run_oracle(oracle, text).logits[0].numpy()
    kind = "cls" if "bert" in name or name == "embedding-gemma" else "lasttoken"
    return pooling.unit(pooling.pooled(pooling.hidden_states(oracle, text), kind))


if __name__ == "__main__":
    main(sys.argv[1:])
