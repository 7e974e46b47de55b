# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""What a call from Python costs above the C call: attention forward of 5 tensors without rows.

    python python/benchmarks/overhead.py [--library build/libcofuse.so]

Without rows the operator only checks its arguments. The C call is timed through ctypes with
arguments made before, less an empty call through ctypes. Best of many short runs: a busy machine
shows in the others.
"""

import argparse
import ctypes
import platform
import timeit

import numpy

import cofuse

CALLS, RUNS = 200, 500


def best(function):
    return min(timeit.repeat(function, number=CALLS, repeat=RUNS)) / CALLS * 1e6


class DType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Params(ctypes.Structure):
    _fields_ = (
        [("size", ctypes.c_size_t), ("dtype", DType), ("format", ctypes.c_int)]
        + [(name, ctypes.c_int64) for name in ("n_batch", "n_rows", "n_heads", "n_kv_heads")]
        + [(name, ctypes.c_int64) for name in ("head_dim_qk", "head_dim_v")]
        + [(name, ctypes.c_int) for name in ("mask", "layout", "chunking", "schedule")]
        + [("scale", ctypes.c_double)]
        + [(name, ctypes.c_int) for name in ("forward_only", "wire_f32", "save_kv")]
    )


class Args(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t)] + [
        (name, ctypes.POINTER(Tensor))
        for name in ("q", "k", "v", "o", "lse", "dout", "dq", "dk", "dv", "saved_kv")
    ]


class StreamNow(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("handle", ctypes.c_void_p)]


def c_tensor(array):
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    device = (ctypes.c_int32 * 2)(1, 0)
    return Tensor(array.ctypes.data, device, array.ndim, DType(2, 32, 1), shape)


def c_call(library, arrays):
    """Microseconds of cof_attention_forward itself."""
    lib = ctypes.CDLL(library)
    lib.cof_world_team.restype = ctypes.c_void_p
    lib.cof_world_team.argtypes = [ctypes.c_void_p]
    lib.cof_attention_plan_create.argtypes = [ctypes.c_void_p] * 4
    world, plan = ctypes.c_void_p(), ctypes.c_void_p()
    assert lib.cof_world_create(None, ctypes.byref(world)) == 0
    params = Params(size=ctypes.sizeof(Params), dtype=DType(2, 32, 1), n_batch=1, n_heads=2,
                    head_dim_qk=16)
    assert lib.cof_attention_plan_create(lib.cof_world_team(world), ctypes.byref(params), None,
                                         ctypes.byref(plan)) == 0
    kept = [ctypes.pointer(c_tensor(a)) for a in arrays]
    args = ctypes.byref(Args(ctypes.sizeof(Args), *kept))
    forward = lib.cof_attention_forward
    forward.argtypes = [ctypes.c_void_p, ctypes.c_void_p, StreamNow]
    now = StreamNow(0, None)
    assert forward(plan, args, now) == 0
    empty = lib.cof_status_name # no work, as many arguments
    empty.argtypes = [ctypes.c_int, ctypes.c_void_p, StreamNow]
    return best(lambda: forward(plan, args, now)) - best(lambda: empty(0, args, now))


def report(name, arrays, plan, team, base):
    direct = best(lambda: plan.forward(*arrays))
    functional = best(lambda: cofuse.attention(*arrays[:3], team=team))
    line = f"{name:28} plan.forward {direct:6.2f} us    cofuse.attention {functional:6.2f} us"
    if base is not None:
        line += f"    above C: {direct - base:5.2f} us, {functional - base:5.2f} us"
    print(line)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", help="libcofuse.so, to time the C call too")
    options = parser.parse_args()
    arrays = [numpy.empty((1, 0, 2, 16), numpy.float32) for _ in range(4)]
    arrays.append(numpy.empty((1, 2, 0), numpy.float32))
    base = c_call(options.library, arrays) if options.library else None
    print(f"Python {platform.python_version()}" + (f", C call {base:.2f} us" if base else ""))
    with cofuse.init() as world:
        plan = cofuse.AttentionPlan(world.team, dtype="f32", n_batch=1, n_rows=0, n_heads=2,
                                    head_dim_qk=16)
        report(f"NumPy {numpy.__version__}", arrays, plan, world.team, base)
        try:
            import torch
        except ImportError:
            return
        tensors = [torch.from_numpy(a) for a in arrays]
        report(f"torch {torch.__version__}", tensors, plan, world.team, base)


if __name__ == "__main__":
    main()
