"""The options of an engine, once: dataclasses per concern. Flags, YAML keys, keywords, help and docs come from them.

A field made with `option()` carries its help text, bounds and choices. `EngineConfig.from_kwargs` is the one way in:
it takes flat names (`max_num_seqs=8`), refuses unknown ones with the nearest known name, checks types and bounds, and
checks what must hold between options. What depends on the model or the machine ("auto" values) is resolved later, by
the engine, into a new config. Spelling and defaults follow vLLM where the meaning is the same.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from quire.errors import echo
from quire.options import check_option, check_rules, option, option_fields, unknown_option
from quire.server_config import ServerConfig

DEMO_MODEL = "quire-demo"
# Values of --quantization that say what a checkpoint holds, as vLLM spells them.
STORED_QUANTIZATIONS = ("awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4")
TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Model"""

    model: str = option(DEMO_MODEL, "Model folder, Hugging Face id, or the built-in quire-demo.")
    served_model_name: list[str] = option([], "Names under which the server offers the model; default: the model.")
    tokenizer: str | None = option(None, "Folder or id of the tokenizer, if not the model's own.")
    skip_tokenizer_init: bool = option(False, "Work on token ids only; no tokenizer is loaded.")
    revision: str | None = option(None, "Branch, tag or commit on the Hugging Face hub.")
    download_dir: str | None = option(None, "Where downloads are kept; default: the Hugging Face cache.")
    model_impl: str = option(
        "auto",
        "Whose code runs the model: quire's own; an installed transformers', for any of its causal language models; "
        "auto takes the first that knows it.",
        choices=("auto", "quire", "transformers"),
    )
    runner: str = option(
        "auto",
        "What the model is run for: generate text, or pooling, that is vectors and scores of texts; auto: what its "
        "architecture does, or pooling where the folder has sentence-transformers' files.",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = option(
        "auto",
        "What pooling makes of a model that generates text: vectors (embed), or how likely it says yes (classify); "
        "auto: what its folder says, or embed.",
        choices=("auto", "none", "embed", "classify"),
    )
    load_format: str = option(
        "auto",
        "How weights are read: safetensors or GGUF, whichever there is (auto); pickles of PyTorch only by name (pt); "
        "dummy invents them.",
        choices=("auto", "safetensors", "pt", "gguf", "dummy"),
    )
    safetensors_load_strategy: str = option(
        "lazy",
        "How safetensors and GGUF files come into memory: mapped and read when their turn comes (lazy), the system "
        "reading them ahead meanwhile (prefetch), or read whole before anything else, for slow network disks (eager).",
        choices=("lazy", "prefetch", "eager"),
    )
    dtype: str = option(
        "auto",
        "Type the weights are held in; auto takes the checkpoint's.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = option(
        None,
        "Turn weights into integers while loading: int8 with inputs rounded to 8 bits too, int8-weight-only without, "
        "int4 in groups of 64 with inputs of 8 bits; embeddings and output head keep 8 bits. The other names say what "
        "the checkpoint is quantized with, which is found out without them, and are refused if it is not.",
        choices=("int8", "int4", "int8-weight-only", *STORED_QUANTIZATIONS),
    )
    max_model_len: int | None = option(
        None, "Longest prompt plus output, in tokens; default: the model's.", low=1, metavar="TOKENS"
    )
    hf_overrides: dict[str, Any] = option({}, "JSON object merged over the model's config.json.", json=True)
    generation_config: str = option(
        "auto",
        "Where default sampling values come from: auto reads generation_config.json, none keeps the neutral ones.",
        choices=("auto", "none"),
    )
    max_logprobs: int = option(
        20, "Most log-probabilities per position that a request may ask for; -1: the whole vocabulary.", low=-1
    )
    logits_processors: list[str] = option(
        [],
        "Plug-ins that requests may name to change logits: NAME=MODULE:ATTRIBUTE, or the name of an entry point of "
        "the group quire.logits_processors.",
        metavar="PLUGIN",
    )
    chat_template: str | None = option(None, "File with a Jinja chat template, if not the model's own.")
    chat_template_content_format: str = option(
        "auto",
        "How chat templates are given content: as a text (string), as a list of parts (openai), or as the request has "
        "it, but as a text where the template knows no parts (auto).",
        choices=("auto", "string", "openai"),
    )
    default_chat_template_kwargs: dict[str, Any] = option(
        {}, "JSON object of chat template variables, such as enable_thinking; requests override it.", json=True
    )
    tool_call_parser: str | None = option(
        None, "Format of the model's tool calls; default: recognised from the chat template.", metavar="NAME"
    )
    reasoning_parser: str | None = option(
        None, "Format of the model's reasoning; default: recognised from the chat template.", metavar="NAME"
    )
    allow_nonfinite: bool = option(False, "Serve weights even if some are NaN or infinite.")
    seed: int = option(
        0,
        "Seed of dummy weights and, offline, of requests that bring none; a server draws theirs.",
        low=0,
        high=2**63 - 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV cache"""

    block_size: int = option(16, "Tokens per block.", low=1, high=1024, metavar="TOKENS")
    gpu_memory_utilization: float = option(
        0.9, "Share of the device's memory that weights and KV cache may take.", low=0.01, high=1.0
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Memory of the KV cache, such as 2GiB; default: what is free.", low=1, size=True, metavar="SIZE"
    )
    num_gpu_blocks_override: int | None = option(None, "Number of blocks, whatever memory there is.", low=1)
    kv_cache_dtype: str = option(
        "auto",
        "Type of cached keys and values; auto takes the weights', int8 and fp8 (e4m3, on GPUs) have a scale per token "
        "and head.",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8"),
    )
    latent_cache: bool = option(
        True,
        "Models with multi-head latent attention cache one vector per token, which all heads share; off: the keys and "
        "values of every head.",
    )
    enable_prefix_caching: bool | None = option(
        None,
        "Reuse the KV of earlier requests with the same beginning; default: on, but for models with layers that keep a "
        "state.",
    )
    prefix_match_unit: int = option(
        1,
        "Reuse inside a block is rounded down to a multiple of so many tokens; the block size: whole blocks only.",
        low=1,
        high=1024,
        metavar="TOKENS",
    )
    swap_space: int | None = option(
        None,
        "Host memory for the KV of swapped sequences and of evicted prefixes, such as 4GiB; a bare number is GiB, 0 is "
        "none; default: 4GiB, but on a CPU at most a quarter of the cache's memory.",
        low=0,
        size=True,
        gib=True,
        metavar="SIZE",
    )
    kv_resident_layers: int = option(
        0,
        "On a GPU, let requests in beyond its memory, with the KV of so many layers there and that of the others in "
        "host memory (swap-space), from where each step brings it; 0: all layers are on the GPU.",
        low=0,
        high=1024,
        metavar="LAYERS",
    )
    kv_disk_space: int = option(
        0,
        "Disk space for evicted prefixes, which also survive a restart there, such as 20GiB; a bare number is GiB, 0 "
        "is none.",
        low=0,
        size=True,
        gib=True,
        metavar="SIZE",
    )
    kv_disk_dir: str | None = option(
        None, "Folder of the prefixes on disk; default: one in the user's cache directory.", metavar="FOLDER"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Scheduling"""

    scheduler: str = option(
        "unified",
        "How steps are made: decodes and parts of prompts together (unified), or either whole prompts or decodes, "
        "prompts first (prefill-first).",
        choices=("unified", "prefill-first"),
    )
    max_num_seqs: int = option(256, "Most sequences running at once.", low=1, high=65536)
    max_num_batched_tokens: int = option(2048, "Most tokens computed in one step.", low=1, high=2**24, metavar="TOKENS")
    scheduling_policy: str = option(
        "fcfs",
        "Who goes first among the waiting: who came first, who has the lowest priority number, whose prompt is cached "
        "for longest (lpm), or tenants in turn by weight (fair).",
        choices=("fcfs", "priority", "lpm", "fair"),
    )
    priority_ageing: float = option(
        60.0,
        "With the priority policy, seconds of waiting that count as much as one rank; 0 lets low ranks wait for ever.",
        low=0.0,
        metavar="SECONDS",
    )
    tenant_weights: dict[str, Any] = option(
        {}, "For the fair policy: JSON object of shares by tenant; others weigh 1.", json=True
    )
    watermark: float = option(
        0.01,
        "Share of the KV cache's blocks kept free when a request joins others, so that those can grow a little first.",
        low=0.0,
        high=0.9,
    )
    delay_factor: float = option(
        0.0,
        "With the prefill-first scheduler, new prompts wait for so many times as long as the last step of prompts "
        "took, so that more of them go together; 0 does not let them wait.",
        low=0.0,
    )
    max_overtake_seconds: float = option(
        5.0,
        "How long the first waiting request may be overtaken, because it does not fit or others are cached for longer.",
        low=0.0,
        metavar="SECONDS",
    )
    jump_forward: bool = option(
        True, "Append text that a grammar leaves no alternative to without asking the model for each token of it."
    )
    preemption_mode: str = option(
        "auto",
        "What becomes of a running request when blocks run out: its KV is computed again later, or swapped to host "
        "memory; auto swaps requests of several sequences.",
        choices=("auto", "recompute", "swap"),
    )
    long_prefill_token_threshold: int = option(
        0,
        "Most prompt tokens of one request in one step; 0: a prompt too long for a step gets a quarter of each.",
        low=0,
        metavar="TOKENS",
    )
    async_scheduling: bool | None = option(None, "Plan the next step while the last one still runs; default: on GPUs.")
    max_num_queued_reqs: int | None = option(
        None, "Most unfinished requests the server accepts before it answers 503; default: 4 x max-num-seqs.", low=1
    )
    max_num_queued_tokens: int | None = option(
        None,
        "Most prompt tokens that wait for their first token before the server answers 503; default: so many requests "
        "as may be unfinished, with as many tokens each as one step computes.",
        low=1,
        metavar="TOKENS",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """LoRA"""

    enable_lora: bool = option(False, "Serve LoRA adapters beside the model, many in one batch.")
    max_loras: int = option(1, "Most adapters in one batch.", low=1, high=1024)
    max_lora_rank: int = option(16, "Highest rank of an adapter.", low=1, high=4096)
    max_cpu_loras: int | None = option(
        None, "Most adapters kept in memory; others are read again when they are needed; default: max-loras.", low=1
    )
    lora_extra_vocab_size: int = option(
        0, "By how many tokens an adapter may enlarge the vocabulary.", low=0, high=65536, metavar="TOKENS"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Device"""

    device: str = option(
        "auto",
        "Where the model runs: auto takes an NVIDIA GPU (cuda) if there is one and PyTorch and Triton are installed; "
        "reference is plain PyTorch, slow and readable.",
        choices=("auto", "cpu", "cuda", "reference"),
    )
    enforce_eager: bool = option(
        False,
        "On a GPU, launch every kernel from Python and record no CUDA graphs: slower steps, a little more memory.",
    )
    max_cudagraph_capture_size: int = option(
        512, "Steps of up to so many tokens are recorded as CUDA graphs.", low=1, high=65536, metavar="TOKENS"
    )
    attention_backend: str = option(
        "auto",
        "Whose attention kernels run on a GPU: ours (triton); PyTorch's for prompts that begin here and ours for the "
        "rest (torch); FlashInfer's, if installed (flashinfer); auto: what is fastest where both can do it.",
        choices=("auto", "triton", "torch", "flashinfer"),
    )
    num_threads: int | None = option(None, "Threads of the CPU kernels; default: all cores.", low=1, high=1024)
    simd_level: str = option(
        "auto",
        "Instructions of the CPU kernels; auto uses all that this CPU has, others also restrict it to theirs.",
        choices=("auto", "avx512-bf16-vnni", "avx512", "avx2", "neon", "generic"),
    )
    batch_invariant: bool = option(
        False,
        "Give the same tokens and log-probabilities, bit by bit, in any batch, chunk, or cache. CPU kernels always do; "
        "the reference then computes every row by itself.",
    )
    tensor_parallel_size: int = option(1, "Ranks a layer is split over; only 1 so far.", low=1, high=1)


CONFIG_GROUPS: tuple[type, ...] = (ModelConfig, CacheConfig, SchedulerConfig, LoRAConfig, DeviceConfig)
SERVER_GROUPS: tuple[type, ...] = (*CONFIG_GROUPS, ServerConfig)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options of an engine; `server` is there when it stands behind HTTP."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    @property
    def max_model_len(self) -> int:
        """The context length of a config that is resolved (`engine/resolve.py`) [tokens]."""
        assert self.model.max_model_len is not None, "resolved"
        return self.model.max_model_len

    @classmethod
    def from_kwargs(cls, *, groups: tuple[type, ...] = CONFIG_GROUPS, **values: Any) -> EngineConfig:
        """Build a checked config from flat option names.

        Raises:
            ConfigError: an unknown option, a bad value, or options that contradict each other.
        """
        known = {item.name: item for item in option_fields(groups)}
        for name in values:
            if name not in known:
                raise unknown_option(name, list(known))
        config = cls().replace(**{name: check_option(known[name], value) for name, value in values.items()})
        config.check()
        return config

    def replace(self, **options: Any) -> EngineConfig:
        """Return the config with some options, by flat name, replaced. The values are not checked."""
        groups: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            group = getattr(self, item.name)
            changes = {known.name: options[known.name] for known in dataclasses.fields(group) if known.name in options}
            if changes:
                groups[item.name] = dataclasses.replace(group, **changes)
        return dataclasses.replace(self, **groups)

    def check(self) -> None:
        """Check what must hold between options; raise `ConfigError` naming both."""
        model, cache, scheduler, lora, server = self.model, self.cache, self.scheduler, self.lora, self.server
        bad_arguments = [
            name for name in model.default_chat_template_kwargs if name in TEMPLATE_ARGUMENTS or not name.isidentifier()
        ]
        bad_weights = [
            f"{echo(weight)} for {echo(tenant)}"
            for tenant, weight in scheduler.tenant_weights.items()
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf
        ]
        layerwise, prefill_first = cache.kv_resident_layers, scheduler.scheduler == "prefill-first"
        rules: dict[str, object] = {
            "skip_tokenizer_init contradicts tokenizer; give one of them": model.skip_tokenizer_init
            and model.tokenizer,
            f"default_chat_template_kwargs must not set {echo(next(iter(bad_arguments), None))}": bad_arguments,
            "num_gpu_blocks_override contradicts kv_cache_memory_bytes; give one of them": (
                cache.num_gpu_blocks_override is not None and cache.kv_cache_memory_bytes is not None
            ),
            "kv_disk_dir needs kv_disk_space, such as 20GiB": cache.kv_disk_dir is not None and not cache.kv_disk_space,
            "kv_disk_space needs enable_prefix_caching": cache.kv_disk_space and cache.enable_prefix_caching is False,
            "kv_resident_layers contradicts preemption_mode swap: the host's memory is the layers'": (
                layerwise and scheduler.preemption_mode == "swap"
            ),
            "kv_resident_layers contradicts kv_disk_space; give one of them": layerwise and cache.kv_disk_space,
            "kv_resident_layers needs scheduler unified, which knows whom to let wait": layerwise and prefill_first,
            "kv_resident_layers needs swap_space, such as 4GiB: host memory for the other layers": (
                layerwise and cache.swap_space == 0
            ),
            "scheduling_policy lpm needs scheduler unified": prefill_first and scheduler.scheduling_policy == "lpm",
            "long_prefill_token_threshold needs scheduler unified": (
                prefill_first and scheduler.long_prefill_token_threshold
            ),
            "delay_factor needs scheduler prefill-first": scheduler.delay_factor and not prefill_first,
            "tenant_weights needs scheduling_policy fair": (
                scheduler.tenant_weights and scheduler.scheduling_policy != "fair"
            ),
            f"max_cpu_loras is {lora.max_cpu_loras}; it must be at least max_loras, {lora.max_loras}": (
                lora.max_cpu_loras is not None and lora.max_cpu_loras < lora.max_loras
            ),
            "lora_modules needs enable_lora": server.lora_modules and not lora.enable_lora and server.models is None,
            f"tenant_weights must have positive numbers, got {next(iter(bad_weights), None)}": bad_weights,
            "ssl_certfile and ssl_keyfile need each other": (server.ssl_certfile is None)
            != (server.ssl_keyfile is None),
        }
        check_rules(rules)
        server.check()

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options as flat names, the inverse of `from_kwargs` (with all groups)."""
        groups = [getattr(self, item.name) for item in dataclasses.fields(self)]
        return {item.name: getattr(group, item.name) for group in groups for item in dataclasses.fields(group)}

    def shown(self) -> dict[str, Any]:
        """Return what differs from the defaults, secrets hidden, for the log."""
        values = self.to_kwargs()
        return {
            item.name: "(hidden)" if item.option.secret else values[item.name]
            for item in option_fields(SERVER_GROUPS)
            if values[item.name] != item.default
        }
