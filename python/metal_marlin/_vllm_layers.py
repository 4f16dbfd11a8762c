"""vLLM: the quantization method `metal_marlin`, and the methods of its layers.

A layer has no parameters until its weights were prepared: vLLM's loader would copy them. The method
takes the tensors out of the loader's stream, reads them from the checkpoint after the others were
loaded, cuts this rank's part and prepares it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import vllm.envs
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    QKVParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import WeightsMapper

from . import _core
from ._torch_experts import Layer, experts, layers
from ._torch_joined import joined_linear
from ._torch_linear import register, weights_of
from ._torch_prepared import check_preparable
from ._vllm_weights import CheckpointWeights, ExpertsPlan, LinearShape, Parallel
from .errors import UnsupportedError
from .linear import dequantize, open_device
from .moe import moe_options

METHOD = "metal_marlin"
# Layers of vLLM that join matrices of the checkpoint, for models that do not say so.
_JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class _Dropped:
    """A pattern of vLLM's WeightsMapper that finds the tensors which layers read themselves."""

    def __init__(self, weights: CheckpointWeights, layers: int | None) -> None:
        self._weights, self._layers = weights, layers

    def search(self, tensor: str) -> bool:
        """Whether vLLM's loader must not see a tensor."""
        return self._weights.is_taken(tensor, self._layers)


@register_quantization_config(METHOD)
class MetalMarlinConfig(QuantizationConfig):  # type: ignore[misc]
    """Finds the quantized layers of a directory of this library, or of another program that it
    reads."""

    def __init__(self, content: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.content = content or {}
        self._model = ""
        self._revision: str | None = None
        self._layers = 0
        self._mappers: list[Any] = []
        self._weights: CheckpointWeights | None = None

    def __getstate__(self) -> dict[str, Any]:
        # An open checkpoint belongs to its process.
        return {**self.__dict__, "_weights": None, "_mappers": []}

    def get_name(self) -> str:
        """The name of the method in config.json and of `--quantization`."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The types of activations."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The kernels are for compute capability 8.0 and later."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: config.json says everything, or the checkpoint's reader finds it."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MetalMarlinConfig:
        """Takes quantization_config from config.json."""
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Takes checkpoints of other programs when the user names this method."""
        return METHOD if user_quant == METHOD else None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Notes the model; its checkpoint is opened in the process that loads it."""
        self._model, self._revision = model_name, revision
        text = hf_config.get_text_config() if hf_config is not None else None
        self._layers = int(getattr(text, "num_hidden_layers", 0))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Takes the names that vLLM's model gives to the checkpoint's tensors."""
        if self._weights is not None:
            self._weights.rename(hf_to_vllm_mapper.map_name)
        else:
            self._mappers.append(hf_to_vllm_mapper)

    def get_checkpoint_weight_mapper(self) -> Any:
        """Called on every load: drops the tensors that layers of this method read themselves."""
        # Another stage of a pipeline has layers that this process does not know.
        layers = self._layers if get_pp_group().world_size == 1 and self._layers else None
        return WeightsMapper(orig_to_new_regex={_Dropped(self.weights(), layers): None})

    def weights(self) -> CheckpointWeights:
        """The opened checkpoint."""
        if self._weights is None:
            self._weights = CheckpointWeights(_directory(self._model, self._revision))
            for mapper in self._mappers:
                self._weights.rename(mapper.map_name)
        return self._weights

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of a layer; vLLM's own for one that is not quantized."""
        weights = self.weights()
        if isinstance(layer, RoutedExperts):
            plan = _plan_experts(layer, prefix, weights)
            return None if plan is None else MarlinExpertsMethod(layer.moe_config, weights, plan)
        if isinstance(layer, LinearBase):
            packed = {**_JOINED, **self.packed_modules_mapping}
            paths = weights.linear_paths(prefix, packed)
            if paths is None:
                return UnquantizedLinearMethod()
            return MarlinLinearMethod(weights, paths)
        if isinstance(layer, VocabParallelEmbedding) and weights.is_quantized(prefix):
            head = isinstance(layer, ParallelLMHead)
            return (MarlinHeadMethod if head else MarlinEmbeddingMethod)(weights, prefix)
        return None


def _directory(model: str, revision: str | None) -> str:
    """The directory of a model, downloaded from the hub if it is a name there."""
    if os.path.isdir(model):
        return model
    import huggingface_hub

    return str(
        huggingface_hub.snapshot_download(
            model,
            revision=revision,
            cache_dir=get_current_vllm_config().load_config.download_dir,
            allow_patterns=["*.safetensors", "*.json"],
            local_files_only=huggingface_hub.constants.HF_HUB_OFFLINE,
        )
    )


def _device_now() -> torch.device:
    """The device that vLLM creates a layer on, with its index."""
    return torch.empty(0).device


class _Prepared:
    """Prepared matrices of a layer, replaced when its weights are loaded again."""

    def __init__(self) -> None:
        self.device = _device_now()
        self.handles: list[int] = []

    def set(self, parts: Sequence[_core.QuantizedWeights]) -> None:
        """Prepares matrices for the device."""
        for handle in self.handles:
            weights_of.drop(handle)
        self.handles = [register(self, weights, self.device) for weights in parts]


class MarlinLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """A linear layer of one or several matrices, whose formats may differ."""

    requires_device_loading = False

    def __init__(self, weights: CheckpointWeights, paths: list[str]) -> None:
        self._weights, self._paths = weights, paths
        self._batch_invariant = bool(vllm.envs.VLLM_BATCH_INVARIANT)

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Notes the sizes, and takes the matrices from vLLM's loader."""
        self._weights.take(self._paths)
        self._shape = LinearShape(
            input_size, input_size_per_partition, output_partition_sizes, _all_outputs(layer)
        )
        self._prepared = _Prepared()

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Reads, cuts and prepares the matrices."""
        on = Parallel(layer.tp_rank, layer.tp_size)
        replicated = self._shape.in_shard == self._shape.in_features and sum(
            self._shape.out_shards
        ) == sum(self._shape.out_features)
        if replicated:
            on = Parallel()
        self._prepared.set(self._weights.linear(self._paths, self._shape, on))

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., in] -> [..., out of this rank]"""
        result: torch.Tensor = joined_linear(
            x, bias, self._prepared.handles, sum(self._shape.out_shards), self._batch_invariant
        )
        return result


def _all_outputs(layer: nn.Module) -> list[int]:
    """Output features on all ranks, of each matrix that a layer joins."""
    if isinstance(layer, QKVParallelLinear):
        # Its output_sizes count key-value heads once for every rank that has a copy.
        return [
            layer.total_num_heads * layer.head_size,
            layer.total_num_kv_heads * layer.head_size,
            layer.total_num_kv_heads * layer.v_head_size,
        ]
    sizes = getattr(layer, "output_sizes", None)
    return [layer.output_size] if sizes is None else list(sizes)


class MarlinHeadMethod(QuantizeMethodBase):  # type: ignore[misc]
    """An output head; its rows are padded as vLLM pads the vocabulary."""

    requires_device_loading = False

    def __init__(self, weights: CheckpointWeights, path: str) -> None:
        self._weights, self._path = weights, path
        self._batch_invariant = bool(vllm.envs.VLLM_BATCH_INVARIANT)

    def create_weights(self, layer: nn.Module, *sizes: Any, **extra_weight_attrs: Any) -> None:
        """Takes the matrix from vLLM's loader."""
        self._weights.take([self._path])
        self._prepared = _Prepared()

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Reads and prepares the rows of this rank."""
        at = layer.shard_indices
        first, end = at.org_vocab_start_index, at.org_vocab_end_index
        rows = self._weights.rows(self._path, first, end, layer.embedding_dim)
        self._prepared.set([] if rows is None else [rows])

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., hidden] -> logits [..., padded vocabulary of this rank]"""
        result: torch.Tensor = joined_linear(
            x,
            bias,
            self._prepared.handles,
            layer.num_embeddings_per_partition,
            self._batch_invariant,
        )
        return result


class MarlinEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """An embedding table, dequantized to the model's type: vLLM gathers its rows."""

    def __init__(self, weights: CheckpointWeights, path: str) -> None:
        self._weights, self._path = weights, path

    def create_weights(self, layer: nn.Module, *sizes: Any, **extra_weight_attrs: Any) -> None:
        """Takes the matrix from vLLM's loader."""
        self._weights.take([self._path])
        super().create_weights(layer, *sizes, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Dequantizes the rows of this rank."""
        at = layer.shard_indices
        first, end = at.org_vocab_start_index, at.org_vocab_end_index
        rows = self._weights.rows(self._path, first, end, layer.embedding_dim)
        table = layer.weight.data
        table.zero_()
        if rows is not None:
            table[: end - first].copy_(torch.from_numpy(dequantize(rows)).T)
        super().process_weights_after_loading(layer)


def _plan_experts(layer: nn.Module, prefix: str, weights: CheckpointWeights) -> ExpertsPlan | None:
    """Where the checkpoint has a layer's experts; None if they are not quantized."""
    names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    interleaved = layer.activation.value == "swigluoai"
    count = layer.global_num_experts
    return weights.experts_plan(prefix.removesuffix(".routed_experts"), names, count, interleaved)


def gate_options(layer: Any) -> dict[str, Any]:
    """The options of the expert call for a layer's activation."""
    name = layer.activation.value
    if name in ("silu", "gelu_tanh") and layer.swiglu_limit is None:
        return {"activation": name}
    if name in ("swigluoai", "swigluoai_uninterleave"):
        limit = 7.0 if layer.swiglu_limit is None else float(layer.swiglu_limit)
        alpha = 1.702 if layer.swiglu_alpha is None else float(layer.swiglu_alpha)
        if layer.swiglu_beta in (None, 1.0) and limit > 0:
            return {"limit": limit, "alpha": alpha}
    raise UnsupportedError(f"{layer.layer_name}: experts with activation {name} are not supported")


def local_experts(expert_map: torch.Tensor | None) -> set[int] | None:
    """The experts that expert parallelism puts on this rank; None: all."""
    if expert_map is None:
        return None
    return set(torch.nonzero(expert_map >= 0).flatten().tolist())


class MarlinExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """The routed experts of a layer in one call, after vLLM's router.

    With expert parallelism, experts of other ranks add nothing, so that ids stay global.
    """

    requires_device_loading = False

    def __init__(self, moe: Any, weights: CheckpointWeights, plan: ExpertsPlan) -> None:
        super().__init__(moe)
        self._weights, self._plan = weights, plan
        self._handle: int | None = None
        self._batch_invariant = bool(vllm.envs.VLLM_BATCH_INVARIANT)

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Checks that the layer can be computed; the plan took its matrices."""
        self._options = moe_options(**gate_options(layer), batch_invariant=self._batch_invariant)
        self._device = _device_now()

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *arguments: Any
    ) -> tuple[int, int]:
        """The sizes, which need no padding."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """None: vLLM's kernels are not used."""
        return None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Reads, cuts and prepares the experts of this rank."""
        check_preparable(self._device)
        parallel = layer.moe_config.moe_parallel_config
        prepared = self._weights.experts(
            self._plan,
            Parallel(parallel.tp_rank, parallel.tp_size),
            local_experts(layer.expert_map),
            open_device(str(self._device)),
        )
        if self._handle is not None:
            layers.drop(self._handle)
        self._handle = layers.add(self, Layer(prepared, self._options))

    def apply(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The weighted sums of the selected experts of x [tokens, hidden] on this rank."""
        if layer.apply_router_weight_on_input:
            if topk_weights.shape[-1] != 1:
                raise UnsupportedError(
                    f"{layer.layer_name}: router weights on the input expect one expert a token, "
                    f"got {topk_weights.shape[-1]}"
                )
            x = x * topk_weights.to(x.dtype)
            topk_weights = torch.ones_like(topk_weights)
        result: torch.Tensor = experts(x, topk_ids, topk_weights, self._handle)
        return result
