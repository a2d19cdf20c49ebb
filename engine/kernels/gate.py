"""The gated feed-forward part's activation (Shazeer, 2020, "GLU variants improve transformer")."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def gate_kernel(gate_up, out, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T, size / BLOCK). gate_up is [T, 2 * size], out [T, size], both contiguous.

    Bytes: 2 * T * size elements read, T * size written.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # g (1 + tanh a) / 2 = g sigmoid(2 a), with a = sqrt(2 / pi) (g + 0.044715 g^3)
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * tl.sigmoid(gate)
    tl.store(out + row * size + columns, (activated * up).to(out.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor, *, gelu: bool) -> Tensor:
    """[T, 2N] to activation(first half) * second half, [T, N]: GELU in its tanh form, or SiLU."""
    tokens, double = gate_up.shape
    out = gate_up.new_empty(tokens, double // 2)
    gate_kernel[(tokens, triton.cdiv(double // 2, BLOCK))](gate_up, out, double // 2, GELU=gelu, BLOCK=BLOCK)
    return out
