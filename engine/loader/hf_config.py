"""config.json of a Hugging Face folder to the settings of a model."""

from dataclasses import replace

from engine.batch import ModelConfig
from engine.layers.rope import Rope
from engine.loader.checkpoint import (
    ATTENTION_INPUT,
    FEED_FORWARD,
    LayerAttention,
    ModelFileError,
    ModelSettings,
    check_sizes,
)
from engine.loader.fields import Fields
from engine.loader.hf_rope import read_rope, read_theta

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
}
GELU = "gelu_pytorch_tanh"
GATES = {"llama": "silu", "qwen2": "silu", "qwen3": "silu", "gemma2": GELU, "gemma3": GELU}

# What a field that is left out means.
HEAD_DIM = {"qwen3": 128, "gemma2": 256, "gemma3": 256}
ROPE_THETA = {"gemma3": 1e6}
LOCAL_ROPE_THETA = 1e4
WINDOW = 4096
QWEN_MAX_WINDOW_LAYERS = 28
GEMMA_FULL_ATTENTION_EVERY = {"gemma2": 2, "gemma3": 6}
GEMMA_QUERY_SCALE = 256

# What the file is and who wrote it; tokens, which the tokenizer's own files settle, and how text is drawn by default;
# training, and what a call returns; how a product is cut up, which is not what it is.
_HARMLESS = """
_attn_implementation _attn_implementation_autoset _name_or_path _sliding_window_pattern architectures auto_map dtype
finetuning_task is_llama_config model_type name_or_path torch_dtype transformers.js_config transformers_version
unsloth_fixed unsloth_version

begin_suppress_tokens bos_token_id cache_implementation decoder_start_token_id diversity_penalty do_sample
early_stopping encoder_no_repeat_ngram_size eos_token_id forced_bos_token_id forced_eos_token_id length_penalty
max_length max_new_tokens max_sequence_length min_length num_beam_groups num_beams num_return_sequences pad_token_id
repetition_penalty sep_token_id suppress_tokens temperature tokenizer_class top_k top_p typical_p unk_token_id

attention_dropout embd_pdrop hidden_dropout id2label initializer_range keys_to_ignore_at_inference label2id
model_max_length num_labels output_attentions output_hidden_states problem_type resid_pdrop return_dict
router_aux_loss_coef seq_length task_specific_params torchscript use_cache use_return_dict

chunk_size_feed_forward pretraining_tp
"""
HARMLESS = frozenset(_HARMLESS.split())


def read_settings(fields: Fields) -> ModelSettings:
    """Raises ModelFileError for an architecture or a setting that Farthing cannot run, naming it."""
    names = fields.raw("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "unnamed"
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise ModelFileError(
            f"{fields.where}: architecture {name!r} is not supported (can run: {', '.join(ARCHITECTURES)})"
        )
    for gate in ("hidden_activation", "hidden_act"):
        activation = fields.raw(gate) or GATES[architecture]
        if activation != GATES[architecture]:
            raise ModelFileError(f"{fields.where}: activation {activation!r} is not supported for {name}")
    if fields.raw("is_causal") is False:
        raise ModelFileError(f"{fields.where}: is_causal is false, and Farthing runs causal models only")
    if fields.number("partial_rotary_factor", 1.0) != 1:
        raise ModelFileError(f"{fields.where}: partial_rotary_factor is not supported: heads rotate whole here")
    rope = _rope_fields(fields, architecture)
    theta = read_theta(rope, fields.number("rope_theta", ROPE_THETA.get(architecture, 1e4)))
    config = _sizes(fields, name, architecture, theta)
    if architecture in GEMMA_FULL_ATTENTION_EVERY:
        settings = _gemma(fields, config, rope)
    else:
        settings = _llama(fields, config, rope, name)
    fields.check_all_known(HARMLESS)
    return settings


def _sizes(fields: Fields, name: str, architecture: str, theta: float) -> ModelConfig:
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads if name == "LlamaForCausalLM" else None),
        head_dim=fields.integer("head_dim", HEAD_DIM.get(architecture, hidden // max(heads, 1))),
        max_context=fields.integer("max_position_embeddings"),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        # Left out where it is the family's default.
        tied_embeddings=fields.flag("tie_word_embeddings", architecture in GEMMA_FULL_ATTENTION_EVERY),
    )
    return check_sizes(config, fields.where)


def _rope_fields(fields: Fields, architecture: str) -> Fields | None:
    """Of the layers that see everything. `rope_scaling` is the older name; where both are there, it is what counts."""
    found = fields.group("rope_parameters")
    if found is not None and architecture == "gemma3":
        parts = found
        found = parts.group("full_attention")
        parts.raw("sliding_attention")
        parts.check_all_known()
    return fields.group("rope_scaling") or found


def _gemma3_local_rope(fields: Fields, config: ModelConfig) -> Rope:
    """Of the layers with a window."""
    parts = fields.group("rope_parameters")
    local = None if parts is None else parts.group("sliding_attention")
    theta = read_theta(local, fields.positive("rope_local_base_freq", LOCAL_ROPE_THETA))
    return read_rope(local, theta, config.head_dim, config.max_context)[0]


def _llama(fields: Fields, config: ModelConfig, rope_fields: Fields | None, name: str) -> ModelSettings:
    rope, context = read_rope(rope_fields, config.rope_theta, config.head_dim, config.max_context)
    if name == "MistralForCausalLM":
        windows = [_window(fields)] * config.num_layers
    elif name == "LlamaForCausalLM":
        windows = [None] * config.num_layers
    else:
        windows = _qwen_windows(fields, config)
    return ModelSettings(
        config=check_sizes(replace(config, max_context=context), fields.where),
        ropes=(rope,),
        layers=tuple(LayerAttention(window) for window in windows),
        scale=config.head_dim**-0.5,
        biases=_biases(fields, name),
    )


def _biases(fields: Fields, name: str) -> frozenset[str]:
    if name == "Qwen2ForCausalLM":
        fields.raw("attention_bias")  # always these, whatever it says
        return ATTENTION_INPUT
    if name == "MistralForCausalLM":
        return frozenset()
    attention = ATTENTION_INPUT | {"attn_output"} if fields.flag("attention_bias") else frozenset()
    return attention | (FEED_FORWARD if name == "LlamaForCausalLM" and fields.flag("mlp_bias") else frozenset())


def _qwen_windows(fields: Fields, config: ModelConfig) -> list[int | None]:
    first = fields.integer("max_window_layers", QWEN_MAX_WINDOW_LAYERS)
    local = _layer_types(fields, config) or [layer >= first for layer in range(config.num_layers)]
    window = _window(fields)
    if not fields.flag("use_sliding_window"):
        window = None
    return [window if is_local else None for is_local in local]


def _window(fields: Fields) -> int | None:
    """Null says that there is none; a file that leaves it out means what the families have in common."""
    if fields.has("sliding_window") and fields.raw("sliding_window") is None:
        return None
    window = fields.integer("sliding_window", WINDOW)
    if window < 1:
        raise ModelFileError(f"{fields.where}: sliding_window is {window}, and must be above 0")
    return window


def _layer_types(fields: Fields, config: ModelConfig) -> list[bool] | None:
    """Whether each layer has a window; None where the file leaves it to a pattern."""
    kinds = fields.raw("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != config.num_layers:
        raise ModelFileError(f"{fields.where}: layer_types must have one entry for each of {config.num_layers} layers")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise ModelFileError(f"{fields.where}: layer type {kind!r} is not supported")
    return [kind == "sliding_attention" for kind in kinds]


def _gemma(fields: Fields, config: ModelConfig, rope_fields: Fields | None) -> ModelSettings:
    every = GEMMA_FULL_ATTENTION_EVERY[config.architecture]
    ropes: tuple[Rope, ...] = (read_rope(rope_fields, config.rope_theta, config.head_dim, config.max_context)[0],)
    attention_cap: float | None = None
    if config.architecture == "gemma3":
        every = fields.integer("sliding_window_pattern", every)
        ropes += (_gemma3_local_rope(fields, config),)
        # transformers has this field for Gemma 3 and never uses it, and neither does anybody else.
        fields.raw("attn_logit_softcapping")
        logit_cap = fields.nonzero("final_logit_softcapping")
    else:
        attention_cap = fields.nonzero("attn_logit_softcapping", 50.0)
        logit_cap = fields.nonzero("final_logit_softcapping", 30.0)
    if every < 1:
        raise ModelFileError(f"{fields.where}: sliding_window_pattern is {every}, and must be above 0")
    window, local_rope = _window(fields), len(ropes) - 1
    kinds = _layer_types(fields, config) or [bool((layer + 1) % every) for layer in range(config.num_layers)]
    return ModelSettings(
        # The file's context is what a stretched embedding reaches, unlike Llama's.
        config=config,
        ropes=ropes,
        layers=tuple(LayerAttention(window, local_rope) if is_local else LayerAttention() for is_local in kinds),
        scale=fields.positive("query_pre_attn_scalar", GEMMA_QUERY_SCALE) ** -0.5,
        attention_softcap=attention_cap,
        logit_softcap=logit_cap,
        biases=ATTENTION_INPUT | {"attn_output"} if fields.flag("attention_bias") else frozenset(),
    )
