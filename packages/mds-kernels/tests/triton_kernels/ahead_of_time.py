"""Compile every Triton kernel for GPUs that are not here, and print registers and stack as JSON.

The public functions are called as in training; instead of launching, each launch is recorded with
its arguments and compiled for each architecture exactly as it would be there.

    python ahead_of_time.py
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from mds_kernels.backends.triton import cross_entropy, glu, norm, permutation, rope, softmax
from mds_kernels.backends.triton.launch import LONGEST_ROW
from mds_kernels.objective import Objective

ARCHITECTURES = (80, 90, 100)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DTYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.uint8: "u8",
}


def main():
    launches = record(call_everything)
    rows = [
        {"kernel": name, "size": size, "architecture": f"sm_{architecture}", **usage}
        for (name, size, _), launch in launches.items()
        for architecture in ARCHITECTURES
        for usage in [compile_for(architecture, *launch)]
    ]
    sys.stdout.write(json.dumps(rows))


def record(function):
    """Return {(kernel, size, signature): launch} of all that ``function`` would launch."""
    launches = {}

    def run(self, *args, grid, warmup, **options):
        named = {**dict(zip(self.arg_names, args, strict=False)), **options}
        block = named.get("BLOCK", named.get("HALF"))
        dtype = next(x.dtype for x in args if isinstance(x, torch.Tensor))
        flags = "".join(str(int(v)) for v in named.values() if isinstance(v, bool))
        key = (self.__name__, f"{block} {DTYPES[dtype]} {flags}".strip(), str(sorted(options)))
        launches[key] = (self, named)

    truth, JITFunction.run = JITFunction.run, run
    try:
        function()
    finally:
        JITFunction.run = truth
    return launches


def compile_for(architecture, kernel, named):
    warps = named.get("num_warps", 4)
    constants, signature, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = named[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            constants[parameter.name], signature[parameter.name] = value, "constexpr"
            continue
        signature[parameter.name] = kind(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": warps})
    return resources(compiled.asm["cubin"])


def kind(value):
    if isinstance(value, torch.Tensor):
        return f"*{DTYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def resources(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", told)
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "stack": stack + local}


# ---- what is called ----------------------------------------------------------------------------


def call_everything():
    for dtype in (torch.bfloat16, torch.float32):
        for columns in (768, 4096, LONGEST_ROW):
            call_norms(columns, dtype)
        call_gates(dtype)
        call_rope(dtype)
        call_softmax(dtype)
        call_permutation(dtype)
        call_losses(dtype)


def leaf(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, requires_grad=True)


def backward(*results):
    for result in results:
        result.sum().backward(retain_graph=True)


def call_norms(columns, dtype):
    x, residual = leaf(4, columns, dtype=dtype), leaf(4, columns, dtype=dtype)
    weight, bias = leaf(columns, dtype=dtype), leaf(columns, dtype=dtype)
    for results in (
        norm.add_rms_norm(x, residual, weight, eps=1e-5),
        norm.add_layer_norm(x, residual, weight, bias, eps=1e-5),
    ):
        torch.autograd.backward(results, [torch.ones_like(one) for one in results])


def call_gates(dtype):
    x, bias = leaf(4, 8192, dtype=dtype), leaf(8192, dtype=dtype)
    backward(glu.swiglu(x, None), glu.swiglu(x, bias))
    backward(*(glu.geglu(x, bias, approximate=kind) for kind in ("none", "tanh")))


def call_rope(dtype):
    query, key = leaf(16, 2, 32, 128, dtype=dtype), leaf(16, 2, 8, 128, dtype=dtype)
    angles = torch.ones(16, 1, 1, 64)
    for interleaved in (False, True):
        backward(*rope.rope(query, key, angles, angles, interleaved=interleaved))


def call_softmax(dtype):
    scores = leaf(1, 2, 16, 8192, dtype=dtype)
    mask = torch.zeros(1, 1, 16, 8192, dtype=torch.bool)
    for given, causal in ((None, True), (mask, False), (mask, True)):
        backward(softmax.scaled_masked_softmax(scores, given, scale=0.125, causal=causal))


def call_permutation(dtype):
    x = leaf(16, 4096, dtype=dtype)
    positions = torch.arange(32).view(16, 2)
    probabilities = leaf(16, 2, dtype=torch.float32)
    rows, _, _ = permutation.moe_permute(x, positions % 8, num_experts=8)
    backward(permutation.moe_unpermute(rows, positions, probabilities))
    backward(permutation.moe_unpermute(rows, positions, None))


def call_losses(dtype):
    for smoothing in (0.0, 0.1):
        objective = Objective(
            vocab_start=0,
            vocab_size=50257,
            group=None,
            label_smoothing=smoothing,
            z_loss=0.0,
            ignore_index=-100,
            chunk_size=None,
        )
        logits = leaf(16, 50304, dtype=dtype)
        labels = torch.zeros(16, dtype=torch.int64)
        backward(cross_entropy.cross_entropy(logits, labels, objective=objective))


if __name__ == "__main__":
    main()
