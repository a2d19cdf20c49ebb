"""The gated feed-forward part's activation (Shazeer, 2020, "GLU variants improve transformer")."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=["tokens"])
def gate_kernel(gate_up, out, tokens, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T * size / BLOCK). gate_up is [T, 2 * size], out [T, size], both contiguous.

    Bytes: 2 * T * size elements read, T * size written.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < tl.cast(tokens, tl.int64) * size
    start = gate_up + place + place // size * size
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + size, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # g (1 + tanh a) / 2 = g sigmoid(2 a), with a = sqrt(2 / pi) (g + 0.044715 g^3)
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * tl.sigmoid(gate)
    tl.store(out + place, (activated * up).to(out.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor, *, gelu: bool) -> Tensor:
    """[T, 2N] to activation(first half) * second half, [T, N]: GELU in its tanh form, or SiLU."""
    tokens, double = gate_up.shape
    out = gate_up.new_empty(tokens, double // 2)
    gate_kernel[(triton.cdiv(out.numel(), BLOCK),)](gate_up, out, tokens, double // 2, GELU=gelu, BLOCK=BLOCK)
    return out
