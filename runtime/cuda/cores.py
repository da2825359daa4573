"""Keeps the threads that compute experts on cores of their own.

They read weights as fast as memory gives them; two on one core, or one that moves to the other socket, cost
bandwidth that nothing gives back. The calling thread stays free: threads that it starts later inherit its
affinity."""

from __future__ import annotations

import ctypes
import os
import threading

import torch

from daop.machine import physical_cores
from daop.runtime.native import parallel_function

Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Parallel = ctypes.CFUNCTYPE(None, Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


class CoreBinding:
    """Binds the workers of whichever thread computes; every thread has its own. ``enabled`` False: does
    nothing."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._bound: int | None = None  # the thread whose workers were bound last

    def bind(self) -> None:
        """Bind the calling thread's workers, if they are not."""
        caller = threading.get_ident()
        if self._enabled and self._bound != caller:
            self._bound = caller
            bind_workers()


def bind_workers() -> list[int]:
    """Bind each of torch's OpenMP workers to a core of its own; the cores, or nothing where torch runs on no
    OpenMP that can be asked, or has more threads than there are cores."""
    function = parallel_function()
    cores, threads = physical_cores(), torch.get_num_threads()
    if function is None or function.value is None or threads > len(cores):
        return []
    caller, lock = threading.get_ident(), threading.Lock()
    left, bound = cores[1:], []  # the first stays for the thread that calls

    def body(_: int | None) -> None:
        if threading.get_ident() == caller:
            return
        with lock:
            if not left:
                return
            core = left.pop(0)
        try:
            os.sched_setaffinity(0, {core})
        except OSError:  # a container that takes cores away meanwhile; the thread stays where it may be
            return
        bound.append(core)

    Parallel(function.value)(Body(body), None, threads, 0)
    return bound
