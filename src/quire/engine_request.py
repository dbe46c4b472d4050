"""`EngineRequest`: one request as it travels from the frontend to the worker, and its parts.

The frontend builds it, and keeps it in case that another engine must continue it. The engine gives it to the
scheduler, whose `Request` has it as `engine_request`, and the worker gets it with each new sequence
(`step.NewSequenceData`). Its fields are restated nowhere: whoever does not read a part passes it on. Nothing here knows
text, queues or arrays.
"""

from __future__ import annotations

import msgspec

from quire.checks import wrong_value
from quire.pooling_params import PoolingParams
from quire.sampling_params import BeamSearchParams, SamplingParams

MAX_NAME_LENGTH = 256
MAX_PATH_LENGTH = 4096


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter, as a caller names it.

    Attributes:
        lora_name: what it is called, in metrics and by clients of a server.
        lora_int_id: at least 1; another adapter must have another one.
        lora_path: its folder, with adapter_config.json and adapter_model.safetensors.

    Raises `RequestError` for a field that cannot be one.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for name, most in (("lora_name", MAX_NAME_LENGTH), ("lora_path", MAX_PATH_LENGTH)):
            value = getattr(self, name)
            if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
                raise wrong_value(name, f"a text of 1 to {most} printable characters", value)
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 2**63:
            raise wrong_value("lora_int_id", "a positive integer", number)


class ThinkingData(msgspec.Struct, frozen=True):
    """The bound on the reasoning of a sequence (`SamplingParams.thinking_token_budget`), in tokens of the model.

    Reasoning is open from the first generated token on if `open` is set, otherwise from where `start_ids` were
    generated, and ends where `end_ids` were. After `budget` tokens of it that are not its end, `end_ids` are appended
    as if they had been sampled. Only the first reasoning of a sequence counts.
    """

    start_ids: list[int]
    end_ids: list[int]
    budget: int
    open: bool = False


class ResumedSequence(msgspec.Struct, array_like=True):
    """The progress of a sequence in an engine that died.

    `token_ids` were generated and delivered; they are not delivered again. `sampler_state` as in `NewSequenceData`.
    """

    token_ids: list[int]
    sampler_state: float | None = None


class EngineRequest(msgspec.Struct, tag=True):
    """One prompt, and the completions of it that are generated side by side.

    Attributes:
        request_id: unique among live requests. arrival_time: monotonic seconds.
        sampling_params: of every sequence of the request: `n` is 1, and the grammar replaces structured outputs.
        max_tokens: most tokens to generate, already limited to the context.
        stop_ids: all token ids that end the sequence: EOS ids unless ignored, and `stop_token_ids`.
        sequence_ids, seeds: one for each completion; the front draws seeds where the caller gave none. Sequence ids
            are unique among live sequences, and outputs bear them. A beam search has one of each. Without any there
            is one sequence, with the request's id and seed 0.
        bad_words_ids: token sequences that may not be generated (`bad_words`, tokenized).
        dry_breakers: the tokens that spell a sequence breaker of the DRY sampler: any of the first, then exactly the
            second ones.
        priority: lower runs earlier (with the priority policy). cache_salt: prefix blocks are shared only among
            requests with the same salt. tenant: the account it runs on, see `--tenant-weights`.
        background: whether it runs behind all requests that are not, whatever the policy: nobody waits for it.
        beam: search for the most likely sequences instead of sampling.
        grammar: the tokens after the prompt spell a text of its language (Lark, as `structured.builder` writes it);
            compiled by the engine before the request is queued.
        thinking: how to end reasoning that grows too long.
        lora: its LoRA adapter, loaded before the request is queued if it is not resident.
        pooling: what to compute from the prompt's hidden states, task included; nothing is generated then.
        resumed: the progress of each sequence when an engine died, in the order of `sequence_ids`, without those that
            had finished: generation continues from there. None: the request is new.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float = 0.0
    max_tokens: int = 1
    stop_ids: list[int] = []
    sequence_ids: list[str] = []
    seeds: list[int] = []
    bad_words_ids: list[list[int]] = []
    dry_breakers: list[tuple[list[int], list[int]]] = []
    priority: int = 0
    cache_salt: str | None = None
    tenant: str = ""
    background: bool = False
    beam: BeamSearchParams | None = None
    grammar: str | None = None
    thinking: ThinkingData | None = None
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None
    resumed: list[ResumedSequence] | None = None

    def __post_init__(self) -> None:
        if not self.sequence_ids:
            self.sequence_ids, self.seeds = [self.request_id], self.seeds or [0]

    @property
    def lora_int_id(self) -> int:
        """The number of its LoRA adapter, 0 for none."""
        return 0 if self.lora is None else self.lora.lora_int_id
