"""RMSNorm (Zhang and Sennrich, 2019), alone or of a residual stream that takes up a sub-layer's result first."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x, delta, weight, out, rows, size, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows / ROWS): a program holds its rows of `size` elements in registers, so each is read once.

    x, delta and out are [rows, size], contiguous; weight is float32.
    Bytes: x read and out written; with ADD also delta read and x written. The weight stays in the cache.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (columns < size)
    place = row * size + columns
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + place, values.to(x.dtype.element_ty), mask=inside)
    inverse = 1 / tl.sqrt(tl.sum(values * values, axis=1) / size + eps)
    normed = values * inverse[:, None] * tl.load(weight + columns, mask=columns < size, other=0.0)
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """Norm over the last dimension of [T, size], as a new tensor. With a `delta` [T, size], x becomes x + delta."""
    rows, size = x.shape
    out = x.new_empty(x.shape)
    constants = launch_constants(size)
    rms_norm_kernel[(triton.cdiv(rows, constants["ROWS"]),)](
        x, x if delta is None else delta, weight, out, rows, size, eps, ADD=delta is not None, **constants
    )
    return out


def launch_constants(size: int) -> dict[str, int]:
    """Of rms_norm_kernel: short rows go together, and a thread holds at least eight elements."""
    block = triton.next_power_of_2(size)
    rows = max(1, 1024 // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(max(rows * block // 256, 1), 16)}
