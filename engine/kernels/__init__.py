"""Triton kernels, one a file, each with the function that launches it. The same source runs on NVIDIA and AMD.

Constants of a launch are in capitals. Sizes that change from step to step are not specialised, so that no step waits
for a compiler. Under TRITON_INTERPRET=1 (set before triton is imported) the kernels run on CPU tensors.
"""

import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
