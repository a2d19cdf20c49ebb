"""The metadata of a GGUF file to the settings of a model, read as llama.cpp reads it.

Where llama.cpp's own reading loses what its converter wrote (an attention factor for YaRN), the model's original
configuration counts.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from engine.batch import ModelConfig
from engine.layers import rope
from engine.layers.rope import Rope
from engine.loader.checkpoint import ATTENTION_INPUT, LayerAttention, ModelFileError, ModelSettings, check_sizes
from engine.loader.fields import Fields

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
HARMLESS = ("vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned")
GEMMA_FULL_ATTENTION_EVERY = {"gemma2": 2, "gemma3": 6}
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
GEMMA2_WINDOW = 4096
LOCAL_ROPE_THETA = 1e4


def read_settings(
    fields: Fields, architecture: str, shapes: Mapping[str, tuple[int, ...]], rope_divisors: Tensor | None
) -> ModelSettings:
    """`fields` without the architecture's prefix; `rope_divisors` is the file's rope_freqs.weight.

    Raises ModelFileError for a setting that Farthing cannot run, naming it.
    """
    config = _sizes(fields, architecture, shapes)
    if not fields.flag("attention.causal", True):
        raise ModelFileError(f"{fields.where}: attention.causal is false, and Farthing runs causal models only")
    if rope_divisors is not None and rope_divisors.shape != (config.head_dim // 2,):
        raise ModelFileError(
            f"{fields.where}: tensor rope_freqs.weight has shape {list(rope_divisors.shape)}, "
            f"expected {[config.head_dim // 2]}"
        )
    main_rope, context = _rope(fields, config, rope_divisors)
    scale = config.head_dim**-0.5
    ropes: tuple[Rope, ...] = (main_rope,)
    layers = (LayerAttention(),) * config.num_layers
    if architecture == "gemma3":
        ropes += (rope.plain(config.head_dim, fields.positive("rope.freq_base_swa", LOCAL_ROPE_THETA)),)
    if architecture in GEMMA_FULL_ATTENTION_EVERY:
        layers = _gemma_layers(fields, config)
        if config.num_layers == GEMMA_27B_LAYERS[architecture]:
            # The file has no field for it: the 27Bs alone scale queries by hidden size per head.
            scale = (config.hidden_size // config.num_heads) ** -0.5
    settings = ModelSettings(
        config=check_sizes(replace(config, max_context=context), fields.where),
        ropes=ropes,
        layers=layers,
        scale=fields.positive("attention.scale", scale),
        attention_softcap=fields.nonzero("attn_logit_softcapping", 50.0) if architecture == "gemma2" else None,
        logit_softcap=fields.nonzero("final_logit_softcapping", 30.0 if architecture == "gemma2" else None),
        biases=ATTENTION_INPUT if architecture == "qwen2" else _biases(shapes),
    )
    fields.check_all_known(HARMLESS)
    return settings


def _sizes(fields: Fields, architecture: str, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise ModelFileError(
                f"{fields.where}: {key} {fields.raw(key)} differs from the head size {head_dim}: not supported"
            )
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise ModelFileError(f"{fields.where}: tensor token_embd.weight is missing or has no rows")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=shapes["token_embd.weight"][0],
        num_layers=fields.integer("block_count"),
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=fields.integer("context_length"),
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 1e4),
        tied_embeddings="output.weight" not in shapes,
    )
    return check_sizes(config, fields.where)


def _biases(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """The file does not say which projections have a bias: those whose first layer has one."""
    parts = (name.split(".") for name in shapes if name.startswith("blk.0.") and name.endswith(".bias"))
    return frozenset(part for _, _, part, _ in parts)


def _rope(fields: Fields, config: ModelConfig, divisors: Tensor | None) -> tuple[Rope, int]:
    """The embedding and the context it reaches."""
    plain = rope.plain(config.head_dim, config.rope_theta, divisors)
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0)) or 1.0
    original = fields.integer("rope.scaling.original_context_length", config.max_context)
    if factor <= 0 or original < 1:
        raise ModelFileError(
            f"{fields.where}: rope.scaling.factor {factor:g} and original_context_length {original} must be above 0"
        )
    match kind := fields.text("rope.scaling.type", "linear"):
        case "none":
            return plain, config.max_context
        case "linear":
            reached = (
                config.max_context if config.architecture.startswith("gemma") else round(config.max_context * factor)
            )
            return rope.linear(plain, factor), reached
        case "yarn":
            return _yarn(fields, config, plain, factor, original), max(config.max_context, round(original * factor))
    raise ModelFileError(f"{fields.where}: rope scaling {kind!r} is not supported")


def _yarn(fields: Fields, config: ModelConfig, plain: Rope, factor: float, original: int) -> Rope:
    if fields.number("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):  # -1: left to the kind of scaling
        raise ModelFileError(f"{fields.where}: rope.scaling.yarn_ext_factor other than 1 is not supported")
    magnitude = rope.sharpening(factor)
    if multiplier := fields.nonzero("rope.scaling.yarn_log_multiplier"):
        magnitude /= rope.sharpening(factor, multiplier)
    magnitude = fields.positive("rope.scaling.yarn_attn_factor", magnitude)
    return rope.yarn(
        plain,
        config.rope_theta,
        factor,
        original,
        magnitude * fields.positive("rope.scaling.attn_factor", 1.0),
        beta_fast=fields.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.positive("rope.scaling.yarn_beta_slow", 1.0),
    )


def _gemma_layers(fields: Fields, config: ModelConfig) -> tuple[LayerAttention, ...]:
    """Without a window every layer sees everything; with one, each second or sixth does."""
    architecture, count = config.architecture, config.num_layers
    window = fields.integer("attention.sliding_window", GEMMA2_WINDOW if architecture == "gemma2" else 0)
    pattern = fields.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        local = [bool(is_local) for is_local in pattern]
        if len(local) != count:
            raise ModelFileError(f"{fields.where}: attention.sliding_window_pattern has {len(local)} of {count} layers")
    else:
        every = fields.integer("attention.sliding_window_pattern", GEMMA_FULL_ATTENTION_EVERY[architecture])
        local = [every == 0 or layer % every < every - 1 for layer in range(count)]
    near = LayerAttention(window, 1 if architecture == "gemma3" else 0)
    return tuple(near if is_local and window > 0 else LayerAttention() for is_local in local)
