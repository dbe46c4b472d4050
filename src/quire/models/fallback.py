"""The Transformers backend: causal language models that this package does not implement run on transformers' code.

Their attention uses the paged cache through transformers' interface for attention functions; linear layers and
embedding tables are packed and computed by the backend, quantized if the config says so. Everything else is PyTorch, on
the backend's device or one CPU thread: slower than `Decoder`, but correct for every model that attends causally through
that interface.
"""

from __future__ import annotations

import copy
import fnmatch
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.pickled import host_tensor
from quire.checkpoint.tensor import meta_tensor
from quire.checkpoint.transformers_config import refusals, transformers_config
from quire.checkpoint.weights import CheckpointWeights, DummyWeights
from quire.errors import ConfigError, ModelError, echo, first_line
from quire.kernels.backend import Array, AttentionMetadata, AttentionParams, Backend, LayerCache
from quire.layers.attention import take_rows
from quire.layers.builder import Builder, share_of, span_of
from quire.step import KVCacheSpec, LayerKVSpec

COLUMN_WISE, ROW_WISE = "colwise", "rowwise"
_numbers = itertools.count()  # number the attention functions, which transformers finds by name


class TransformersForCausalLM:
    """transformers' model on our cache and linear ops. Steps are no graphs, as PyTorch computes a part of them."""

    ignored_weights: tuple[str, ...] = ("",)  # transformers reads the files itself
    supports_graphs = False
    num_token_types = 0
    classifier = None

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        self.info, self.backend = info, builder.backend
        self.vocab_size = info.vocab_size
        self._step: tuple[list[LayerCache], AttentionMetadata] | None = None  # None also while it is checked
        self._has_windows = False  # whether transformers makes masks of sliding windows
        self._params: dict[int, AttentionParams] = {}
        self._dry_run: tuple[Any, ...] | None = None  # embedding, widest linear layer and head, in a dry run
        self._name = f"quire_{next(_numbers)}"
        self._register()
        self._config = transformers_config(info.path, info.raw)
        skeleton = self._skeleton()
        self._plan = dict(getattr(skeleton, "tp_plan", None) or {})
        check_ranks(self.backend, self._plan, type(skeleton).__name__)
        self._specs = self._layer_specs(skeleton)
        if isinstance(builder.weights, CheckpointWeights | DummyWeights):
            self._load(dummy=isinstance(builder.weights, DummyWeights))
        else:
            self._count(skeleton)

    # Building

    def _register(self) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        AttentionInterface.register(self._name, self._attend)
        AttentionMaskInterface.register(self._name, self._note_mask)

    def _note_mask(self, *args: Any, mask_function: Any = None, **options: Any) -> None:
        """transformers' function that makes a mask: our attention needs none, but windows must be those we know."""
        if self._step is not None or mask_function is None or not any(self.info.layer_windows):
            return
        import torch

        far = torch.tensor(max(window or 0 for window in self.info.layer_windows))
        self._has_windows |= not bool(mask_function(0, 0, far, torch.tensor(0)))

    def _skeleton(self) -> Any:
        import torch
        import transformers

        auto = transformers.AutoModelForCausalLM
        found = auto._model_mapping[type(self._config)]
        kind = found[0] if isinstance(found, tuple) else found
        if not kind._supports_attention_backend:
            raise self._refusal(kind, "does not take attention functions from outside, as paged attention is")
        with torch.device("meta"), refusals(self.info.path, "transformers cannot build it"):
            model = auto.from_config(self._config, attn_implementation=self._name, trust_remote_code=False)
        if any(getattr(module, "is_causal", True) is False for module in model.modules()):
            raise self._refusal(type(model), "attends to later tokens as well (is_decoder in config.json is false)")
        if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
            raise self._refusal(type(model), "numbers its positions by itself")
        return model

    def _refusal(self, kind: type, why: str) -> ModelError:
        return ModelError(f"{self.info.path}: {kind.__name__} of transformers {why}")

    def _layer_specs(self, skeleton: Any) -> list[LayerKVSpec]:
        info, found = self.info, dict[int, LayerKVSpec]()
        heads = share_of(self.backend, info.num_key_value_heads, "number of key/value heads")
        for module in skeleton.modules():
            layer = getattr(module, "layer_idx", None)
            if isinstance(layer, int) and hasattr(module, "scaling"):
                size = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None) or info.head_dim
                found[layer] = LayerKVSpec(heads, size, self.backend.kv_dtype, info.layer_windows[layer])
        if sorted(found) != list(range(info.num_hidden_layers)):
            raise ModelError(
                f"{info.path}: {type(skeleton).__name__} of transformers has {len(found)} attention layers of a kind "
                f"that the paged cache knows (expected {info.num_hidden_layers})"
            )
        return [found[layer] for layer in range(info.num_hidden_layers)]

    def _load(self, *, dummy: bool) -> None:
        """Read the weights, or make dummy ones, and pack those of linear layers and tables."""
        import torch
        import transformers

        auto = transformers.AutoModelForCausalLM
        if dummy:
            model = auto.from_config(self._config, attn_implementation=self._name, dtype=torch.bfloat16)
        else:
            with refusals(self.info.path, "transformers cannot load it"):
                model = auto.from_pretrained(
                    self.info.path,
                    config=self._config,
                    dtype="auto",
                    attn_implementation=self._name,
                    use_safetensors=True,
                    local_files_only=True,
                    trust_remote_code=False,
                )
        model = model.eval()
        tied, head = self._pack_tables(model, torch)
        for parent, name, full, linear in named_modules(model, torch.nn.Linear):
            setattr(parent, name, head if linear is tied else self._packed(full, linear))
        # What was not packed (norms, experts, rotary frequencies) computes where the backend does.
        self._model = model.float().to(to_torch(self.backend.zeros((1,))).device)
        prefix = model.base_model_prefix
        self._body = getattr(model, prefix)
        # The model around a body that returns its input: what transformers computes after the hidden states.
        self._top = copy.copy(self._model)
        self._top._modules = {**self._model._modules, prefix: _pass_through(torch)}
        if self.backend.world_size == 1:  # ranks would have to compute together
            self._check_body(torch)
        self._check_logits()

    def _check_body(self, torch: Any) -> None:
        """Compute two tokens with attention that only looks at its arguments. Raises `ModelError` if that fails."""
        kind, device = type(self._model), to_torch(self.backend.zeros((1,))).device
        ids, positions = torch.tensor([[0, 0]], device=device), torch.tensor([[0, 1]], device=device)
        try:
            with torch.no_grad():
                self._body(input_ids=ids, position_ids=positions, use_cache=False)
        except ModelError:
            raise
        except Exception as error:  # boundary: code that is not ours, about files that are not ours either
            raise self._refusal(kind, f"does not run on the paged cache: {first_line(error)}") from None
        if any(self.info.layer_windows) and not self._has_windows:
            raise self._refusal(kind, "attends to all tokens, though config.json has a sliding_window")

    def _check_logits(self) -> None:
        try:
            self.compute_logits(self.backend.zeros((1, self.info.hidden_size)))
        except (AttributeError, TypeError, RuntimeError) as error:
            why = f"does not take its hidden states apart from its logits: {first_line(error)}"
            raise self._refusal(type(self._model), why) from None

    def _pack_tables(self, model: Any, torch: Any) -> tuple[Any, Any]:
        """Pack embedding tables; return the output head that shares one, or None, and its module."""
        tied = head = None
        for parent, name, _, table in named_modules(model, torch.nn.Embedding):
            is_input = table is model.get_input_embeddings()
            look_up, score = packed_table(self.backend, table, exact=not is_input)
            setattr(parent, name, look_up)
            output = model.get_output_embeddings()
            if type(output) is torch.nn.Linear and output.weight is table.weight and output.bias is None:
                tied, head = output, score
        return tied, head

    def _packed(self, full: str, linear: Any) -> Any:
        style = next((style for pattern, style in self._plan.items() if fnmatch.fnmatch(full, pattern)), None)
        experts = getattr(self._config, "num_experts", None) or getattr(self._config, "num_local_experts", None)
        return packed_linear(self.backend, linear, style, exact=linear.out_features == experts)

    def _count(self, skeleton: Any) -> None:
        """Count the weights in a dry run, whose steps are one embedding and the widest linear layer."""
        import torch

        table, head = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
        packed: dict[int, Any] = {}
        for kind in (torch.nn.Linear, torch.nn.Embedding):
            for _, _, _, module in named_modules(skeleton, kind):
                if id(module.weight) not in packed:
                    is_table = module in (table, head)
                    packed[id(module.weight)] = self.backend.pack_linear(
                        [meta_tensor(module.weight.shape)], table=is_table
                    )
        for parameter in skeleton.parameters():
            if id(parameter) not in packed:
                self.backend.vector(meta_tensor(parameter.shape))
        hidden = self.info.hidden_size
        linears = [module for _, _, _, module in named_modules(skeleton, torch.nn.Linear) if module is not head]
        wide = max((at for at in linears if at.in_features == hidden), key=lambda at: at.out_features, default=head)
        self._dry_run = tuple(packed.get(id(at.weight)) for at in (table, wide, head))

    # Computing

    def kv_cache_spec(self) -> KVCacheSpec:
        return KVCacheSpec(self._specs)

    def forward(
        self, input_ids: Array, positions: Array, kv_caches: list[LayerCache], metadata: AttentionMetadata
    ) -> Array:
        if self._dry_run is not None:
            x = self.backend.embedding(input_ids, self._dry_run[0])
            self.backend.linear(x, self._dry_run[1])
            return take_rows(self.backend, x, metadata.logits_indices)
        import torch

        self._step = kv_caches, metadata
        with torch.no_grad():  # inference mode would forbid in-place changes of the result
            output = self._body(
                input_ids=to_torch(input_ids)[None].long(), position_ids=to_torch(positions)[None], use_cache=False
            )
        self._step = None
        return take_rows(self.backend, to_array(self.backend, output.last_hidden_state[0]), metadata.logits_indices)

    def compute_logits(self, hidden: Array) -> Array:
        if self._dry_run is not None:
            return self.backend.linear(hidden, self._dry_run[2])
        import torch

        with torch.no_grad():
            rows = to_torch(hidden)[None]
            return to_array(self.backend, self._top(inputs_embeds=rows, use_cache=False).logits[0])

    def _attend(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        *,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Any, None]:
        """transformers' attention function: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D]."""
        layer, backend = module.layer_idx, self.backend
        if attention_mask is not None:
            raise self._refusal(type(self._model), "has a mask of its own, which paged attention does not take")
        params = self._params.get(layer)
        if params is None:
            params = self._params[layer] = self._params_of(layer, query, key, scaling, options)
        size, value_size = query.shape[3], value.shape[3]
        if self._step is None:  # while it is checked
            return query.new_zeros((1, query.shape[2], query.shape[1], value_size)), None
        caches, metadata = self._step
        if value_size < size:  # a cache has one size for both
            import torch

            value = torch.nn.functional.pad(value, (0, size - value_size))
        q, k, v = (to_array(backend, x[0].transpose(0, 1).flatten(1)) for x in (query, key, value))
        own = caches[layer].wait_for_load(metadata)
        backend.write_kv(k, v, caches[layer].cache, own.slot_mapping)
        out = to_torch(backend.paged_attention(q, caches[layer].cache, own, params))
        caches[layer].save()
        return out.reshape(1, query.shape[2], query.shape[1], size)[..., :value_size], None

    def _params_of(
        self, layer: int, query: Any, key: Any, scaling: float | None, options: dict[str, Any]
    ) -> AttentionParams:
        spec, heads, size = self._specs[layer], query.shape[1], query.shape[3]
        if (key.shape[1], size) != (spec.num_kv_heads, spec.head_size):
            raise ModelError(
                f"{self.info.path}: layer {layer} has {key.shape[1]} key heads of {size} values (expected "
                f"{spec.num_kv_heads} of {spec.head_size}, by config.json): {echo(self.info.model_type)} is not "
                f"supported through transformers"
            )
        sinks = options.get("s_aux")
        return AttentionParams(
            num_heads=heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=size,
            scale=size**-0.5 if scaling is None else float(scaling),
            sliding_window=spec.sliding_window,
            softcap=options.get("softcap"),
            sinks=None if sinks is None else to_array(self.backend, sinks),
        )


def _pass_through(torch: Any) -> Any:
    """Return a module that returns its input embeddings as hidden states."""

    class States:
        """The output of a body, with nothing but hidden states."""

        def __init__(self, hidden: Any) -> None:
            self.last_hidden_state = hidden

        def __getattr__(self, name: str) -> None:
            return None

        def __getitem__(self, index: int) -> Any:
            return self.last_hidden_state if index == 0 else None

    class PassThrough(torch.nn.Module):  # type: ignore[misc]
        """Replaces a model's body."""

        def forward(self, *args: Any, inputs_embeds: Any, **options: Any) -> Any:
            return States(inputs_embeds)

    return PassThrough()


def to_torch(array: Array) -> Any:
    """Return a backend's array as a torch tensor of the same memory."""
    import torch

    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def to_array(backend: Backend, tensor: Any) -> Array:
    """Return a torch tensor as an array of the backend: float32 where it holds floats, and contiguous."""
    flat = tensor.detach()
    flat = (flat.float() if flat.is_floating_point() else flat.long()).contiguous()
    return flat.numpy() if backend.name == "cpu" else flat


def replacement(function: Callable[[Any], Any]) -> Any:
    """Return a module without parameters that computes `function`."""
    import torch

    class Packed(torch.nn.Module):
        """Replaces a linear layer or a table."""

        def forward(self, x: Any) -> Any:
            return function(x)

    return Packed()


def packed_linear(backend: Backend, linear: Any, style: str | None, *, exact: bool) -> Any:
    """Return a module that computes a `torch.nn.Linear` on the backend.

    `style` is how transformers' plan splits it over ranks: "colwise", "rowwise", or None for not at all.
    """
    weight, bias = host_tensor(linear.weight), None if linear.bias is None else host_tensor(linear.bias)
    if backend.world_size > 1 and style == COLUMN_WISE:
        mine = span_of(backend, linear.out_features, "columns of a linear layer")
        weight = weight.rows(mine.start, mine.stop)
        bias = None if bias is None else bias.rows(mine.start, mine.stop)
    elif backend.world_size > 1 and style == ROW_WISE:
        mine = span_of(backend, linear.in_features, "rows of a linear layer")
        weight = weight.columns(mine.start, mine.stop)
        bias = bias if backend.rank == 0 else None  # the sum over ranks must hold it once
    packed = backend.pack_linear([weight], None if bias is None else [bias], exact=exact)
    inputs, outputs = weight.shape[1], weight.shape[0]

    def compute(x: Any) -> Any:
        rows = backend.linear(to_array(backend, x.reshape(-1, inputs)), packed)
        if style == ROW_WISE:
            rows = backend.all_reduce(rows)
        return to_torch(rows).reshape(*x.shape[:-1], outputs)

    return replacement(compute)


def packed_table(backend: Backend, table: Any, *, exact: bool) -> tuple[Any, Any]:
    """Return a module that looks up a `torch.nn.Embedding` on the backend, and one that scores all of its rows."""
    packed = backend.pack_linear([host_tensor(table.weight)], table=True, exact=exact)
    width, rows = table.embedding_dim, table.num_embeddings

    def look_up(ids: Any) -> Any:
        found = backend.embedding(to_array(backend, ids.reshape(-1)), packed)
        return to_torch(found).reshape(*ids.shape, width)

    def score(x: Any) -> Any:
        return to_torch(backend.linear(to_array(backend, x.reshape(-1, width)), packed)).reshape(*x.shape[:-1], rows)

    return replacement(look_up), replacement(score)


def named_modules(model: Any, kind: Any) -> Iterator[tuple[Any, str, str, Any]]:
    """Yield (parent, name in it, full name, module) of modules of exactly this type."""
    for full, module in list(model.named_modules()):
        if type(module) is kind:
            prefix, _, name = full.rpartition(".")
            yield model.get_submodule(prefix), name, full, module


def check_ranks(backend: Backend, plan: dict[str, str], architecture: str) -> None:
    """Raise ConfigError for several ranks, unless the model has a tensor-parallel plan."""
    if backend.world_size > 1 and not {COLUMN_WISE, ROW_WISE} <= set(plan.values()):
        raise ConfigError(
            f"tensor_parallel_size is {backend.world_size}; {architecture} of transformers has no plan for several "
            "ranks",
            param="tensor_parallel_size",
        )
