"""The options of an engine, once: dataclasses per concern. Flags, YAML keys, keywords, help and docs come from them.

A field made with `option()` carries its help text, bounds and choices. `EngineConfig.from_kwargs` is the one way in:
it takes flat names (`max_num_seqs=8`), refuses unknown ones with the nearest known name, checks types and bounds, and
checks what must hold between options. What depends on the model or the machine ("auto" values) is resolved later, by
the engine, into a new config. Spelling and defaults follow vLLM where the meaning is the same.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass, field
from typing import Any

from quire.errors import echo
from quire.options import check_option, check_rules, option, option_fields, unknown_option
from quire.server_config import ServerConfig

logger = logging.getLogger(__name__)

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
    served_model_name: list[str] = option([], "Model names in the API; default: the value of --model.", many=True)
    tokenizer: str | None = option(None, "Folder or Hugging Face id of the tokenizer; default: the model's.")
    skip_tokenizer_init: bool = option(False, "Load no tokenizer; prompts and outputs are token ids.")
    revision: str | None = option(None, "Branch, tag or commit on the Hugging Face hub.")
    download_dir: str | None = option(None, "Folder for downloads; default: the Hugging Face cache.")
    model_impl: str = option(
        "auto",
        "Model implementation: quire; transformers, for any causal language model of the installed transformers; "
        "auto: quire if it supports the model, otherwise transformers.",
        choices=("auto", "quire", "transformers"),
    )
    runner: str = option(
        "auto",
        "Task of the model: generate text, or pooling (embeddings and scores); auto: by its architecture, or "
        "pooling if the folder has sentence-transformers' files.",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = option(
        "auto",
        "Convert a text generation model for pooling: embeddings (embed), or the probability of yes (classify); "
        "auto: as its folder specifies, or embed.",
        choices=("auto", "none", "embed", "classify"),
    )
    load_format: str = option(
        "auto",
        "Format of the weights: auto loads safetensors or GGUF, whichever is present; pt loads PyTorch pickle "
        "files; dummy initializes random weights.",
        choices=("auto", "safetensors", "pt", "gguf", "dummy"),
        spellings={"bitsandbytes": "auto", "hf": "auto"},
    )
    safetensors_load_strategy: str = option(
        "lazy",
        "How safetensors and GGUF files are read: memory-mapped and read on demand (lazy), with read-ahead in the "
        "background (prefetch), or read as a whole first, for slow network disks (eager).",
        choices=("lazy", "prefetch", "eager"),
    )
    dtype: str = option(
        "auto",
        "Data type of weights and activations; auto: that of the checkpoint.",
        choices=("auto", "float32", "bfloat16", "float16"),
        spellings={"half": "float16", "float": "float32"},
    )
    quantization: str | None = option(
        None,
        "Quantize weights while loading: int8 (weights and activations), int8-weight-only, or int4 (groups of 64, "
        "activations in 8 bits); embeddings and output head use 8 bits. The other names state the format of a "
        "quantized checkpoint, which is detected without them, and are refused if it has another.",
        choices=("int8", "int4", "int8-weight-only", *STORED_QUANTIZATIONS),
    )
    max_model_len: int | None = option(
        None, "Maximum length of prompt plus output; default: the model's.", low=1, metavar="TOKENS"
    )
    hf_overrides: dict[str, Any] = option({}, "JSON object merged into the model's config.json.", json=True)
    generation_config: str = option(
        "auto",
        "Source of default sampling parameters: auto reads generation_config.json, none uses Quire's defaults.",
        choices=("auto", "none"),
    )
    max_logprobs: int = option(
        20, "Maximum number of log-probabilities per position that a request can get; -1: the whole vocabulary.", low=-1
    )
    logits_processors: list[str] = option(
        [],
        "Logits processors that requests can select: NAME=MODULE:ATTRIBUTE, or the name of an entry point of the "
        "group quire.logits_processors.",
        metavar="PLUGIN",
    )
    chat_template: str | None = option(None, "File with a Jinja chat template; default: the model's.")
    chat_template_content_format: str = option(
        "auto",
        "Format of message content for the chat template: string, list of parts (openai), or as in the request, "
        "but a string if the template does not support parts (auto).",
        choices=("auto", "string", "openai"),
    )
    default_chat_template_kwargs: dict[str, Any] = option(
        {}, "JSON object of chat template variables, such as enable_thinking; requests override it.", json=True
    )
    tool_call_parser: str | None = option(
        None, "Format of the model's tool calls; default: detected from the chat template.", metavar="NAME"
    )
    reasoning_parser: str | None = option(
        None, "Format of the model's reasoning; default: detected from the chat template.", metavar="NAME"
    )
    allow_nonfinite: bool = option(False, "Accept weights that contain NaN or infinity.")
    seed: int = option(
        0,
        "Seed of dummy weights and, offline, of requests without a seed; a server draws a random seed for these.",
        low=0,
        high=2**63 - 1,
        spellings={None: 0},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV cache"""

    block_size: int = option(16, "Tokens per block.", low=1, high=1024, metavar="TOKENS")
    gpu_memory_utilization: float = option(
        0.9, "Fraction of the device's memory for weights and KV cache.", low=0.01, high=1.0
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Memory for the KV cache, such as 2GiB; default: the free memory.", low=1, size=True, metavar="SIZE"
    )
    num_gpu_blocks_override: int | None = option(
        None, "Number of KV cache blocks, regardless of the available memory.", low=1
    )
    kv_cache_dtype: str = option(
        "auto",
        "Data type of the KV cache; auto: that of the weights; int8 and fp8 (e4m3, on GPUs) have a scale per "
        "token and head.",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8"),
        spellings={"fp8_e4m3": "fp8"},
    )
    latent_cache: bool = option(
        True,
        "Models with multi-head latent attention cache one latent vector per token, shared by all heads; off: "
        "they cache the keys and values of every head.",
    )
    enable_prefix_caching: bool | None = option(
        None,
        "Reuse the KV cache of earlier requests with the same prefix; default: on, except for models with "
        "recurrent layers.",
    )
    prefix_match_unit: int = option(
        1,
        "Round partial-block prefix hits down to a multiple of this; with the block size, only whole blocks are "
        "reused.",
        low=1,
        high=1024,
        metavar="TOKENS",
    )
    swap_space: int | None = option(
        None,
        "Host memory for swapped sequences and evicted prefixes, such as 4GiB; a number without unit is GiB, 0 "
        "disables it; default: 4GiB, but on a CPU at most a quarter of the KV cache's memory.",
        low=0,
        size=True,
        gib=True,
        metavar="SIZE",
    )
    kv_resident_layers: int = option(
        0,
        "On a GPU, admit requests beyond its memory: the KV cache of this many layers stays on the GPU, that of "
        "the others is in host memory (swap-space) and loaded in each step; 0: all layers stay on the GPU.",
        low=0,
        high=1024,
        metavar="LAYERS",
    )
    kv_disk_space: int = option(
        0,
        "Disk space for cached prefixes, which survive a restart, such as 20GiB; a number without unit is GiB, 0 "
        "disables it.",
        low=0,
        size=True,
        gib=True,
        metavar="SIZE",
    )
    kv_disk_dir: str | None = option(
        None, "Folder for cached prefixes on disk; default: a folder in the user's cache directory.", metavar="FOLDER"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Scheduling"""

    scheduler: str = option(
        "unified",
        "How steps are scheduled: decodes and prefill chunks together (unified), or either whole prompts or "
        "decodes, prompts first (prefill-first).",
        choices=("unified", "prefill-first"),
    )
    max_num_seqs: int = option(256, "Maximum number of running sequences.", low=1, high=65536)
    max_num_batched_tokens: int = option(
        2048, "Maximum number of tokens computed in one step.", low=1, high=2**24, metavar="TOKENS"
    )
    scheduling_policy: str = option(
        "fcfs",
        "Order of waiting requests: first come first served (fcfs), lowest priority number first (priority), "
        "longest cached prefix first (lpm), or fair shares of tenants by weight (fair).",
        choices=("fcfs", "priority", "lpm", "fair"),
    )
    priority_ageing: float = option(
        60.0,
        "With the priority policy, seconds of waiting that count as one priority level; 0: no ageing, requests of "
        "low priority can starve.",
        low=0.0,
        metavar="SECONDS",
    )
    tenant_weights: dict[str, Any] = option(
        {}, "With the fair policy, JSON object of weights by tenant; the weight of others is 1.", json=True
    )
    watermark: float = option(
        0.01,
        "Fraction of the KV cache's blocks kept free when a request is admitted, so that running requests can grow.",
        low=0.0,
        high=0.9,
    )
    delay_factor: float = option(
        0.0,
        "With the prefill-first scheduler, delay new prompts by this factor times the duration of the last prompt "
        "step, which batches more of them; 0: no delay.",
        low=0.0,
    )
    max_overtake_seconds: float = option(
        5.0,
        "Maximum time for which the first waiting request may be overtaken because it does not fit or others have "
        "longer cached prefixes.",
        low=0.0,
        metavar="SECONDS",
    )
    jump_forward: bool = option(
        True,
        "Append tokens without an alternative in the grammar without running the model for each (jump-forward "
        "decoding).",
    )
    preemption_mode: str = option(
        "auto",
        "How a running request is preempted when blocks run out: its KV cache is recomputed later, or swapped to "
        "host memory; auto swaps requests with several sequences and recomputes others.",
        choices=("auto", "recompute", "swap"),
    )
    long_prefill_token_threshold: int = option(
        0,
        "Maximum prompt tokens of one request in one step; 0: a prompt too long for a step gets a quarter of each "
        "step.",
        low=0,
        metavar="TOKENS",
    )
    async_scheduling: bool | None = option(
        None, "Schedule the next step while the last one still runs; default: on for GPUs."
    )
    max_num_queued_reqs: int | None = option(
        None,
        "Maximum number of unfinished requests before the server responds with 503; default: 4 x max-num-seqs.",
        low=1,
    )
    max_num_queued_tokens: int | None = option(
        None,
        "Maximum number of prompt tokens waiting for their first output token before the server responds with "
        "503; default: max-num-queued-reqs x max-num-batched-tokens.",
        low=1,
        metavar="TOKENS",
    )

    @property
    def resolved_max_num_queued_reqs(self) -> int:
        """`max_num_queued_reqs` or its default."""
        return self.max_num_queued_reqs or 4 * self.max_num_seqs

    @property
    def resolved_max_num_queued_tokens(self) -> int:
        """`max_num_queued_tokens` or its default."""
        return self.max_num_queued_tokens or self.resolved_max_num_queued_reqs * self.max_num_batched_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """LoRA"""

    enable_lora: bool = option(False, "Serve LoRA adapters with the model, several in one batch.")
    max_loras: int = option(1, "Maximum number of adapters in one batch.", low=1, high=1024)
    max_lora_rank: int = option(16, "Maximum rank of an adapter.", low=1, high=4096)
    max_cpu_loras: int | None = option(
        None, "Maximum number of adapters in memory; others are loaded again when needed; default: max-loras.", low=1
    )
    lora_extra_vocab_size: int = option(
        0, "Maximum number of tokens that an adapter adds to the vocabulary.", low=0, high=65536, metavar="TOKENS"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Device"""

    device: str = option(
        "auto",
        "Device: auto uses an NVIDIA GPU (cuda) if present and if PyTorch and Triton are installed; reference is "
        "plain PyTorch, slow and readable.",
        choices=("auto", "cpu", "cuda", "reference"),
    )
    enforce_eager: bool = option(
        False,
        "On a GPU, launch every kernel from Python without CUDA graphs: slower steps, slightly less memory in use.",
    )
    max_cudagraph_capture_size: int = option(
        512, "Maximum number of tokens of a step that is captured as a CUDA graph.", low=1, high=65536, metavar="TOKENS"
    )
    attention_backend: str = option(
        "auto",
        "Attention kernels on a GPU: Quire's (triton); PyTorch's for prompts that begin in a step and Quire's for "
        "the rest (torch); FlashInfer's, if installed (flashinfer); auto: the fastest that supports the case.",
        choices=("auto", "triton", "torch", "flashinfer"),
    )
    num_threads: int | None = option(None, "Number of CPU threads; default: all cores.", low=1, high=1024)
    simd_level: str = option(
        "auto",
        "Instruction set of the CPU kernels; auto: all that the CPU supports; other values restrict them.",
        choices=("auto", "avx512-bf16-vnni", "avx512", "avx2", "neon", "generic"),
    )
    batch_invariant: bool = option(
        False,
        "Return bitwise identical tokens and log-probabilities regardless of batch, chunks and cache. CPU kernels "
        "always do; the reference backend then computes every row separately.",
    )
    tensor_parallel_size: int = option(1, "Number of tensor-parallel ranks; only 1 so far.", low=1, high=1, short="-tp")
    pipeline_parallel_size: int = option(
        1, "Number of pipeline-parallel ranks; only 1 so far.", low=1, high=1, short="-pp"
    )
    data_parallel_size: int = option(1, "Number of data-parallel engines; only 1 so far.", low=1, high=1, short="-dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    """Profiler"""

    profiler_dir: str | None = option(
        None, "Folder for profiles, which start_profile and stop_profile write; without it there are none."
    )
    profiler_max_bytes: int = option(
        256 * 2**20, "Maximum size of a profile; what comes after is dropped.", low=1, high=2**40, size=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedOptions:
    """Accepted from vLLM's recipes, where what is asked for is always so"""

    enable_chunked_prefill: bool = option(
        True, "Chunked prefill is always on, except with the prefill-first scheduler.", no_effect=True, fixed=True
    )
    enable_auto_tool_choice: bool = option(
        True, "The model may always call the tools of a request.", no_effect=True, fixed=True
    )
    enable_prompt_tokens_details: bool = option(
        True, "The usage in responses always has the cached tokens.", no_effect=True, fixed=True
    )
    enable_sleep_mode: bool = option(
        True,
        "LLM.sleep is always there; the routes of a server need --enable-admin-endpoints and a key.",
        no_effect=True,
        fixed=True,
    )
    disable_log_requests: bool = option(True, "Prompts are never written to the log.", no_effect=True, fixed=True)
    tokenizer_mode: str = option(
        "auto", "There is one implementation of tokenizers.", choices=("auto",), no_effect=True
    )
    uvicorn_log_level: str = option(
        "warning",
        "The HTTP server has no log of its own; --log-level is for the whole log.",
        choices=("debug", "info", "warning", "error", "critical", "trace"),
        no_effect=True,
    )
    trust_remote_code: bool = option(
        False, "No model's code is ever run; its family is built in, or refused.", no_effect=True
    )


CONFIG_GROUPS: tuple[type, ...] = (ModelConfig, CacheConfig, SchedulerConfig, LoRAConfig, DeviceConfig, ProfilerConfig)
SERVER_GROUPS: tuple[type, ...] = (*CONFIG_GROUPS, ServerConfig)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options of an engine; `server` is used only behind HTTP."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
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
        known = {item.name: item for item in option_fields((*groups, AcceptedOptions))}
        for name in values:
            if name not in known:
                raise unknown_option(name, list(known))
        checked = {name: check_option(known[name], value) for name, value in values.items()}
        for name in [name for name in checked if known[name].group is AcceptedOptions]:
            if checked.pop(name):
                logger.info("%s: %s", name, known[name].option.help)
        config = cls().replace(**checked)
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
            "kv_resident_layers contradicts preemption_mode swap: host memory is used for the layers": (
                layerwise and scheduler.preemption_mode == "swap"
            ),
            "kv_resident_layers contradicts kv_disk_space; give one of them": layerwise and cache.kv_disk_space,
            "kv_resident_layers needs scheduler unified": layerwise and prefill_first,
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
        server.check(profiled=self.profiler.profiler_dir is not None)

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
