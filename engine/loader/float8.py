"""Safetensors checkpoints with 8-bit floating-point weights, widened to float32 as they are read.

Two kinds are common: `fp8`, with one scale for each block of 128 x 128 weights (DeepSeek-AI, 2024, "DeepSeek-V3"), and
compressed-tensors' `float-quantized`, with one scale a tensor, row or block. Both multiply the stored value.
"""

import torch
from torch import Tensor

from engine.loader.checkpoint import ModelFileError
from engine.loader.fields import Fields

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def block_sizes(fields: Fields) -> tuple[int, int] | None:
    """Rows and columns that share a scale, where the configuration gives them. Raises ModelFileError for every other
    kind of quantisation, naming it."""
    found = fields.group("quantization_config")
    if found is None:
        return None
    method = found.text("quant_method", "unnamed")
    known = method == "fp8" or (method == "compressed-tensors" and found.text("format", "") == "float-quantized")
    if not known:
        raise ModelFileError(
            f"{fields.where}: quantization_config of kind {method!r} is not supported (8-bit float weights are: fp8, "
            "or compressed-tensors with format float-quantized)"
        )
    sizes = found.raw("weight_block_size")
    if sizes is None:
        return None
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(isinstance(n, int) and n > 0 for n in sizes)):
        raise ModelFileError(f"{found.where}: weight_block_size is {sizes!r}, expected two numbers")
    return sizes[0], sizes[1]


def widened(values: Tensor, scale: Tensor | None, block: tuple[int, int] | None, what: str) -> Tensor:
    """[N, K] float8 times its scale, one number, [N, 1] or a block's worth each, as float32."""
    if scale is None:
        raise ModelFileError(f"{what} has 8-bit weights but no weight_scale or weight_scale_inv tensor")
    values, scale = values.float(), scale.float()
    if scale.numel() == 1:
        return values * scale.reshape(())
    if values.dim() == 2 and scale.reshape(-1).shape == values.shape[:1] and scale.dim() <= 2:
        return values * scale.reshape(-1, 1)
    rows, columns = block or (1, 1)
    if values.dim() == 2 and scale.shape == (-(-values.shape[0] // rows), -(-values.shape[1] // columns)):
        spread = scale.repeat_interleave(rows, 0)[: len(values)].repeat_interleave(columns, 1)
        return values * spread[:, : values.shape[1]]
    raise ModelFileError(f"{what} of shape {list(values.shape)} has a scale of shape {list(scale.shape)}")
