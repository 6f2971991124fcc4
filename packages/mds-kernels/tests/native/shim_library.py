"""Build the shim with g++ and offer its kernels as graph ops of a backend of the name "shim"."""

import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path

import torch

import mds_kernels
from mds_kernels.backends.fused import norm, softmax
from mds_kernels.backends.torch.graph_op import graph_op

HERE = Path(__file__).parent
LIBRARY = "MDS_SHIM_LIBRARY"  # an already built one, for the process that address-checks
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "--param=asan-stack=0")


def build_shim(folder, *flags):
    """Compile the shim into ``folder`` and return the library's path."""
    output = folder / f"libshim{len(flags)}.so"
    package, torch_folder = Path(mds_kernels.__file__).parent, Path(torch.__file__).parent
    command = [shutil.which("g++"), "-std=c++20", "-O1", "-g", "-shared", "-fPIC", *flags]
    command += [f"-I{HERE / 'shim'}", f"-I{package / 'csrc' / 'include'}"]
    command += [f"-I{torch_folder / 'include'}", str(HERE / "shim" / "shim.cpp")]
    done = subprocess.run(
        [*command, "-o", str(output)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return output


@functools.cache
def load(path):
    library = ctypes.CDLL(str(path))
    library.last_fault.restype = ctypes.c_char_p
    library.set_seed.argtypes = [ctypes.c_uint64]
    for name in ("planted_race", "planted_reuse", "planted_overrun"):
        getattr(library, name).restype = ctypes.c_float
    return library


def pointer(x):
    return None if x is None or not x.numel() else ctypes.c_void_p(x.data_ptr())


def register(library, *, packed):
    """Register the passes under the backend's name ``shim`` (single) or ``shimp`` (packed)."""
    kernels = "shimp" if packed else "shim"

    def call(name, dtype, *arguments):
        kind = f"{str(dtype).removeprefix('torch.')}_{'packed' if packed else '1'}"
        code = getattr(library, f"{name}_{kind}")(*arguments)
        assert code == 0, library.last_fault().decode()

    @graph_op(f"{kernels}_norm_forward", fake=norm.FAKES["norm_forward"])
    def _norm_forward(
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        centred: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        outputs = norm.FAKES["norm_forward"](x, residual, weight, bias, eps, centred)
        y, total, mean, rstd = outputs
        given = [pointer(one) for one in (x, residual, weight, bias, y, total)]
        statistics = [pointer(mean) if centred else None, pointer(rstd)]
        call("norm_forward", x.dtype, *given, *statistics, *x.shape, ctypes.c_float(eps))
        return outputs

    @graph_op(f"{kernels}_norm_backward", fake=norm.FAKES["norm_backward"])
    def _norm_backward(
        grad_y: torch.Tensor,
        grad_total: torch.Tensor | None,
        total: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        centred: bool,
        with_bias: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shapes = (grad_y, grad_total, total, weight, mean, rstd, centred, with_bias)
        outputs = norm.FAKES["norm_backward"](*shapes)
        rows, columns = total.shape
        parts = min(3, rows)
        sums = [torch.empty(parts, columns), torch.empty(parts, columns) if with_bias else None]
        given = [pointer(one) for one in (grad_y, grad_total, total, weight)]
        statistics = [pointer(mean) if centred else None, pointer(rstd)]
        results = [pointer(one) for one in (*outputs, *sums)]
        call("norm_backward", total.dtype, *given, *statistics, *results, rows, columns, parts)
        return outputs

    @graph_op(f"{kernels}_softmax_forward", fake=softmax.FAKES["softmax_forward"])
    def _softmax_forward(
        scores: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
    ) -> torch.Tensor:
        result = torch.empty_like(scores)
        _, heads, queries, keys = scores.shape
        strides = (ctypes.c_int64 * 4)(*((0,) * 4 if mask is None else mask.stride()))
        bytes_of_mask = None if mask is None else ctypes.c_void_p(mask.data_ptr())
        sizes = (heads, queries, keys, ctypes.c_int64(scores.numel() // keys))
        call(
            "softmax_forward",
            scores.dtype,
            pointer(scores),
            bytes_of_mask,
            strides,
            pointer(result),
            *sizes,
            ctypes.c_float(scale),
            ctypes.c_bool(causal),
        )
        return result

    @graph_op(f"{kernels}_softmax_backward", fake=softmax.FAKES["softmax_backward"])
    def _softmax_backward(
        gradient: torch.Tensor, result: torch.Tensor, scale: float
    ) -> torch.Tensor:
        grad_scores = torch.empty_like(result)
        rows = ctypes.c_int64(result.numel() // result.shape[-1])
        given = [pointer(one) for one in (gradient, result, grad_scores)]
        call(
            "softmax_backward",
            result.dtype,
            *given,
            result.shape[-1],
            rows,
            ctypes.c_float(scale),
        )
        return grad_scores

    return kernels


def shim_from_environment(folder):
    """Return the library that this process was told of, or a fresh one."""
    given = os.environ.get(LIBRARY)
    return load(given or build_shim(folder))
