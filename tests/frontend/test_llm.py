"""The offline API: outputs in prompt order, errors before any work, Ctrl-C, and an engine that survives all of it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.messages import EngineOutputs
from quire.engine_request import EngineRequest
from quire.errors import ConfigError, ContextLengthError, EngineDeadError, GenerationError, ModelError, RequestError
from quire.frontend.front_model import load_front_model
from quire.frontend.input_processor import InputProcessor
from quire.sampling_params import RequestOutputKind
from tests.frontend.conftest import write_folder
from tests.helpers.checkpoints import PLAIN_CONFIG
from tests.helpers.errors import refused
from tests.helpers.fake_engine import FakeEngine, fake_front_model, fake_llm, reply_with, small_tokenizer


def quiet(llm: LLM, prompts: Any, params: Any = None, **options: Any) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False, **options)


def test_outputs_come_in_the_order_of_the_prompts() -> None:
    llm, engine = fake_llm(reply=lambda add: [5 + len(add.prompt_token_ids)])
    prompts = [[3] * length for length in (9, 1, 5, 2, 7, 3)] * 4
    params = [SamplingParams(max_tokens=1 + index % 5) for index in range(len(prompts))]
    outputs = quiet(llm, prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.outputs[0].token_ids for output in outputs] == [
        [5 + len(prompt)] * item.max_tokens for prompt, item in zip(prompts, params, strict=True)
    ]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert engine.num_steps > 5


def test_one_prompt_of_any_kind() -> None:
    llm, _ = fake_llm()
    ids = small_tokenizer().encode("hello")
    for prompt in (
        "hello",
        ids,
        {"prompt": "hello"},
        {"prompt_token_ids": ids},
        ["hello"],
        [ids],
        ({"prompt": "hello"},),
    ):
        [output] = quiet(llm, prompt, SamplingParams(seed=1, max_tokens=4))
        assert output.prompt_token_ids == ids
        assert output.outputs[0].text == quiet(llm, "hello", SamplingParams(seed=1, max_tokens=4))[0].outputs[0].text
    assert quiet(llm, "hello")[0].prompt == "hello"
    assert quiet(llm, ids)[0].prompt is None
    assert quiet(llm, []) == []


def test_parameters_are_not_changed_and_defaults_are_the_models() -> None:
    llm, engine = fake_llm(front_model=fake_front_model(temperature=0.3, max_tokens=3))
    params = SamplingParams(max_tokens=2, output_kind=RequestOutputKind.DELTA)
    assert len(quiet(llm, "x", params)[0].outputs[0].token_ids) == 2
    assert params.output_kind == RequestOutputKind.DELTA
    assert len(quiet(llm, "x")[0].outputs[0].token_ids) == 3
    assert engine.added[-1].sampling_params.temperature == 0.3
    assert llm.get_default_sampling_params().temperature == 0.3


def test_several_completions_and_stop_strings() -> None:
    llm, engine = fake_llm(reply=reply_with(small_tokenizer(), "hello world", "abcdef"))
    [output] = quiet(llm, "x", SamplingParams(n=2, stop=["wor", "c"], max_tokens=50))
    assert [item.text for item in output.outputs] == ["hello ", "ab"]
    assert [item.stop_reason for item in output.outputs] == ["wor", "c"]
    assert sorted(engine.aborted) == ["0-0", "0-1"]
    assert not engine.live


def test_one_bad_prompt_and_nothing_is_generated() -> None:
    llm, engine = fake_llm()
    for prompts, params, param in (
        (["ok", ""], SamplingParams(), "prompts[1]"),
        (["ok", [1, 99999]], SamplingParams(), "prompts[1][1]"),
        ([[1] * 300], SamplingParams(), "prompt"),
        (["ok", "ok"], [SamplingParams()], "sampling_params"),
        (["ok"], {"temperature": 1}, "sampling_params"),
        (5, SamplingParams(), "prompts"),
    ):
        with refused(param):
            quiet(llm, prompts, params)
    with pytest.raises(RequestError):
        quiet(llm, ["a", "b"], priority=[1])
    assert engine.added == []
    assert quiet(llm, "fine", priority=[3])[0].finished
    assert engine.added[0].priority == 3


def test_a_bad_prompt_leaves_the_others_alone_if_errors_are_returned() -> None:
    llm, _ = fake_llm()
    outputs = quiet(llm, ["ok", "", [1] * 300, "fine"], on_error="return")
    assert [item.outputs[0].finish_reason == "error" for item in outputs] == [False, True, True, False]
    assert outputs[1].prompt == "" and outputs[1].finished
    errors = [item.outputs[0].error for item in outputs]
    assert isinstance(errors[1], RequestError) and errors[1].param == "prompts[1]"
    assert isinstance(errors[2], ContextLengthError) and errors[2].param == "prompts[2]"
    with refused("on_error"):
        quiet(llm, "a", on_error="ignore")


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_aborts_everything_after_the_step() -> None:
    llm, engine = fake_llm()
    step = engine.step
    in_step: list[bool] = []

    def interrupted() -> EngineOutputs:
        os.kill(os.getpid(), signal.SIGINT)
        in_step.append(True)
        return step()

    engine.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        quiet(llm, ["a", "b", "c"], SamplingParams(max_tokens=50))
    assert in_step == [True], "the step must be finished, and no other begun"
    assert not engine.live
    assert len(engine.aborted) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine.step = step  # type: ignore[method-assign]
    assert quiet(llm, "again", SamplingParams(max_tokens=2))[0].outputs[0].finish_reason == "length"


def test_an_error_in_a_step_takes_the_requests_out() -> None:
    llm, engine = fake_llm()
    step = engine.step

    def broken() -> EngineOutputs:
        raise EngineDeadError("out of memory")

    engine.step = broken  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match="out of memory"):
        quiet(llm, ["a", "b"])
    assert not engine.live
    engine.step = step  # type: ignore[method-assign]
    assert quiet(llm, "again")[0].finished


def test_an_engine_that_refuses_a_request_keeps_none_of_the_others() -> None:
    llm, engine = fake_llm()
    send = engine.send

    def refusing(message: Any) -> None:
        if isinstance(message, EngineRequest) and message.request_id == "2":
            raise RequestError("no more")
        send(message)

    engine.send = refusing  # type: ignore[method-assign]
    llm._requests._send = refusing
    with pytest.raises(RequestError, match="no more"):
        quiet(llm, ["a", "b", "c"])
    assert not engine.live and llm._requests.outputs.num_unfinished == 0
    assert quiet(llm, "again", SamplingParams(max_tokens=2))[0].finished


def test_an_engine_that_forgets_requests_does_not_hang_us() -> None:
    llm, engine = fake_llm()
    engine.has_unfinished = lambda: False  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match="lost 1 requests"):
        quiet(llm, "x")


def test_a_request_that_fails_leaves_the_others_alone() -> None:
    llm, engine = fake_llm()
    engine.fail_on.add("1")
    outputs = quiet(llm, ["a", "b", "c"], SamplingParams(max_tokens=3))
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    error = outputs[1].outputs[0].error
    assert isinstance(error, GenerationError)
    assert error.message == "logits are not finite"
    engine.refuse_on.add("3")
    [output] = quiet(llm, "d")
    error = output.outputs[0].error
    assert isinstance(error, RequestError)
    assert (error.message, error.code) == ("it needs 65 blocks, the pool has 64", "request_refused")


def test_chat_takes_one_conversation_or_many() -> None:
    llm, engine = fake_llm(reply=reply_with(small_tokenizer(), "hello"))
    one = [{"role": "user", "content": "hi"}]
    two = [*one, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "<|im_end|>"}]
    [single] = llm.chat(one, SamplingParams(max_tokens=5), use_tqdm=False)
    outputs = llm.chat([one, two], SamplingParams(max_tokens=5), use_tqdm=False)
    assert [output.outputs[0].text for output in [single, *outputs]] == ["hello"] * 3
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(engine.added[0].prompt_token_ids, False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert engine.added[0].prompt_token_ids == engine.added[1].prompt_token_ids
    assert engine.added[2].prompt_token_ids.count(tokenizer.control_tokens["<|im_end|>"]) == 3
    for bad, param in (([], "messages"), ([{"role": "wizard", "content": "x"}], "messages"), ([[1]], "messages[0]")):
        with refused(param):
            llm.chat(bad, use_tqdm=False)
    with refused("messages", kind=ContextLengthError):
        llm.chat([{"role": "user", "content": "x" * 1000}], use_tqdm=False)


def test_chat_without_a_template_says_so() -> None:
    llm, _ = fake_llm(front_model=fake_front_model(chat_template=None))
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)


def test_progress_is_shown_on_standard_error_only(capfd: pytest.CaptureFixture[str]) -> None:
    llm, _ = fake_llm()
    llm.generate(["a", "b"], SamplingParams(max_tokens=3))
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "2/2" in shown.err
    assert "tokens/s" in shown.err
    quiet(llm, ["a", "b"])
    assert capfd.readouterr() == ("", "")


def test_closing() -> None:
    with fake_llm()[0] as llm:
        engine = llm.llm_engine.core
        assert isinstance(engine, FakeEngine)
        llm.reset_prefix_cache()
        assert engine.num_resets == 1
    assert engine.closed
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        quiet(llm, "x")
    with pytest.raises(EngineDeadError, match="closed"):
        llm.reset_prefix_cache()
    llm, engine = fake_llm()
    del llm
    assert engine.closed


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_model_length": 5}, "unknown option max_model_length; did you mean max_model_len"),
        ({"engine": "inline"}, "unknown option engine"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0 is not allowed"),
        ({"dtype": "float3"}, "dtype: 'float3' is not allowed"),
        ({"max_num_seqs": "8"}, "max_num_seqs: '8' is not allowed; it must be an integer"),
    ],
)
def test_bad_options_are_named_before_anything_is_loaded(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LLM("/nowhere", **options)


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="nowhere"):
        LLM("/nowhere/at/all")


# What the frontend reads of a model folder.


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    path = write_folder(tmp_path / "model", "byte_level", chat_template="{{ messages[0].content }}")
    (path / "config.json").write_text(json.dumps({**PLAIN_CONFIG, "vocab_size": 500}))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "eos_token_id": 421}))
    return path


def load(folder: Path, **options: Any) -> Any:
    return load_front_model(EngineConfig.from_kwargs(model=str(folder), **options))


def processor_of(front: Any) -> Any:
    return InputProcessor(front, FakeEngine(vocab_size=500).ready)


def test_the_frontend_reads_a_model_folder(model_folder: Path) -> None:
    front = load(model_folder)
    assert front.tokenizer.decode(front.tokenizer.encode("fox")) == "fox"
    assert front.template().render([{"role": "user", "content": "hi"}]) == "hi"
    processor = processor_of(front)
    assert processor.default_sampling_params().temperature == 0.7
    assert 421 in processor.eos_token_ids
    neutral = processor_of(load(model_folder, generation_config="none"))
    assert neutral.default_sampling_params() == SamplingParams()
    assert 421 in neutral.eos_token_ids


def test_the_tokenizers_eos_is_used_where_the_model_names_none(model_folder: Path) -> None:
    front = load(model_folder)
    front = dataclasses.replace(front, info=dataclasses.replace(front.info, eos_token_ids=()))
    assert processor_of(front).eos_token_ids == (front.tokenizer.eos_token_id,)


def test_tokenizer_and_template_from_elsewhere(model_folder: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "other", "llama")
    template = tmp_path / "my.jinja"
    template.write_text("mine")
    front = load(model_folder, tokenizer=str(other), chat_template=str(template))
    assert front.tokenizer.bos_token_id is not None
    assert front.template().render([{"role": "user", "content": "hi"}]) == "mine"
    assert load(model_folder, tokenizer=str(other)).chat_template is None
    template.write_text("{{ 1 +")
    with pytest.raises(ModelError, match=r"my\.jinja: chat template, line 1"):
        load(model_folder, chat_template=str(template))
    with pytest.raises(ModelError, match="missing"):
        load(model_folder, chat_template=str(tmp_path / "missing.jinja"))


def test_without_a_tokenizer_there_are_only_ids(model_folder: Path) -> None:
    (model_folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"looked for tokenizer\.json"):
        load(model_folder)
    front = load(model_folder, skip_tokenizer_init=True)
    llm, _ = fake_llm(front_model=front)
    [output] = quiet(llm, [1, 2, 3], SamplingParams(max_tokens=4, logprobs=1))
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 4)
    with pytest.raises(RequestError):
        quiet(llm, "text")
    with pytest.raises(RequestError):
        llm.get_tokenizer()


def test_adds_reach_the_engine_with_running_ids() -> None:
    llm, engine = fake_llm()
    quiet(llm, ["a", "b"])
    quiet(llm, "c")
    assert [add.request_id for add in engine.added] == ["0", "1", "2"]
    assert all(isinstance(add, EngineRequest) for add in engine.added)


def test_a_script_repeats_itself_and_its_requests_differ() -> None:
    def seeds(**options: Any) -> list[int]:
        llm, engine = fake_llm(**options)
        quiet(llm, ["a", "b"], SamplingParams(max_tokens=1))
        quiet(llm, "c", SamplingParams(max_tokens=1))
        return [request.seeds[0] for request in engine.added]

    assert len(set(seeds())) == 3
    assert seeds() == seeds()
    assert seeds(seed=1) != seeds(seed=2)
