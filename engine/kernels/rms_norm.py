"""RMSNorm (Zhang and Sennrich, 2019), alone or of a residual stream that takes up a sub-layer's result first."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(
    x, delta, weight, out, groups, stride, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (rows): a program holds a row of `size` elements in registers, so each is read once.

    x is [T, groups, size] with `stride` elements between tokens; delta and out are contiguous; weight is float32.
    Bytes: x read and out written; with ADD also delta read and x written. The weight stays in the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    place = x + row // groups * stride + row % groups * size + columns
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(delta + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, values.to(x.dtype.element_ty), mask=inside)
    inverse = 1 / tl.sqrt(tl.sum(values * values, axis=0) / size + eps)
    normed = values * inverse * tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * size + columns, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """Norm over the last dimension of [T, size] or [T, groups, size], as a new tensor of that shape.

    Only tokens may be apart in memory. With `delta`, contiguous and of the same shape, x becomes x + delta.
    """
    size = x.shape[-1]
    out = x.new_empty(x.shape)
    groups, block = x.shape[1] if x.dim() == 3 else 1, triton.next_power_of_2(size)
    rms_norm_kernel[(x.numel() // size,)](
        x, x if delta is None else delta, weight, out, groups, x.stride(0), size, eps,
        ADD=delta is not None, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return out


def warps(block: int) -> int:
    """Enough threads that each holds about eight elements of a row."""
    return min(max(block // 256, 1), 16)
