"""Rotary embeddings as Hugging Face configurations describe them: `rope_parameters`, `rope_scaling` in older files.

`dynamic` scaling leaves a model as it is up to `max_position_embeddings` and changes every frequency with each token
beyond. A cached key would have to be another for each length, so such a model is served exactly, up to that length.
"""

from engine.layers import rope
from engine.layers.rope import Rope
from engine.loader.checkpoint import ModelFileError
from engine.loader.fields import Fields

HARMLESS = ("finetuned",)


def read_theta(fields: Fields | None, default: float) -> float:
    """The base of the embedding; `default` where the fields do not give it."""
    if fields is None:
        return default
    theta = fields.number("rope_theta", default)
    if theta <= 1:
        raise ModelFileError(f"{fields.where}: rope_theta is {theta:g}, and must be above 1")
    return theta


def read_rope(fields: Fields | None, theta: float, head_dim: int, first_context: int) -> tuple[Rope, int]:
    """The embedding with base `theta`, and the context it reaches in tokens; `first_context` is the file's
    max_position_embeddings. Raises ModelFileError for a kind that is not supported."""
    if fields is None:
        return rope.plain(head_dim, theta), first_context
    if fields.number("partial_rotary_factor", 1.0) != 1:
        raise ModelFileError(f"{fields.where}: partial_rotary_factor is not supported: heads rotate whole here")
    older_name = fields.text("type", "default")
    kind = fields.text("rope_type", older_name)
    plain = rope.plain(head_dim, theta)
    match kind:
        case "default":
            # A file whose kind was taken away may keep the numbers of it.
            fields.raw("factor"), fields.raw("original_max_position_embeddings")
            found = plain, first_context
        case "linear":
            factor = fields.positive("factor")
            found = rope.linear(plain, factor), round(first_context * factor)
        case "dynamic":
            fields.positive("factor")
            fields.raw("original_max_position_embeddings")
            found = plain, first_context
        case "yarn":
            found = _yarn(fields, plain, theta, first_context)
        case "llama3":
            found = _llama3(fields, plain, first_context), first_context
        case _:
            raise ModelFileError(f"{fields.where}: rope scaling {kind!r} is not supported")
    fields.check_all_known(HARMLESS)
    return found


def _original(fields: Fields, first_context: int) -> int:
    original = fields.integer("original_max_position_embeddings", first_context)
    if original < 1:
        raise ModelFileError(f"{fields.where}: original_max_position_embeddings is {original}, and must be above 0")
    return original


def _llama3(fields: Fields, plain: Rope, first_context: int) -> Rope:
    low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
    if high <= low:
        raise ModelFileError(f"{fields.where}: high_freq_factor {high:g} must be above low_freq_factor {low:g}")
    return rope.llama3(plain, fields.positive("factor"), low, high, _original(fields, first_context))


def _yarn(fields: Fields, plain: Rope, theta: float, first_context: int) -> tuple[Rope, int]:
    original = _original(fields, first_context)
    factor = fields.positive("factor", first_context / original)
    # Both must be there and above 0 to count; else the paper's formula does.
    scale, scale_all = fields.nonzero("mscale"), fields.nonzero("mscale_all_dim")
    magnitude = rope.sharpening(factor)
    if scale and scale_all:
        magnitude = rope.sharpening(factor, scale) / rope.sharpening(factor, scale_all)
    stretched = rope.yarn(
        plain,
        theta,
        factor,
        original,
        fields.positive("attention_factor", magnitude),
        beta_fast=fields.nonzero("beta_fast") or 32.0,
        beta_slow=fields.nonzero("beta_slow") or 1.0,
        truncate=fields.flag("truncate", True),
    )
    return stretched, max(first_context, round(original * factor))
