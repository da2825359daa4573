"""Recency: what was used last is used next. LRU as a forecast, with waits measured on traces."""

from __future__ import annotations

from typing import Self

import numpy as np

from daop.core import FloatArray, Geometry

from . import data as d
from .base import PREDICTORS, Reuse, State
from .history import NEVER, Context, Past, walk


@PREDICTORS.register("recency")
class Recency(Reuse):
    """Mean wait for an expert's next use, by how many tokens ago it was used last.

    Waits are cut at ``cap`` tokens, and so is the age at which all older ones count alike.
    """

    def __init__(self, *, cap: int = 64, max_tokens: int = 50_000, seed: int = 0) -> None:
        self.cap = cap
        self.max_tokens = max_tokens
        self.seed = seed

    def fit(self, data: d.Routing) -> Self:
        self.check_needs(data)
        self.geometry_ = data.geometry
        data = data.sample(self.max_tokens, self.seed)
        waits = d.next_use(data, self.cap)
        total, seen = np.zeros(self.cap + 1), np.zeros(self.cap + 1)
        for rows, _, after in walk(data):
            age = np.minimum(after.since, self.cap).ravel()
            wait = waits[rows].ravel()
            known = wait > 0
            total += np.bincount(age[known], weights=wait[known], minlength=self.cap + 1)
            seen += np.bincount(age[known], minlength=self.cap + 1)
        # Longer unused is never forecast to come back sooner: that is what recency means.
        mean = np.where(seen > 0, total / np.maximum(seen, 1), 1.0)
        self.mean_ = np.maximum.accumulate(mean).astype(np.float32)
        return self

    def wait(self, context: Context, after: Past) -> FloatArray:
        age = np.minimum(after.since, self.cap)
        # the fraction keeps the order of recency within equal means
        return np.asarray(self.mean_[age] + after.since * np.float32(1e-4), dtype=np.float32)

    def state(self) -> State:
        return State(arrays={"mean": self.mean_})

    def restore(self, state: State, geometry: Geometry) -> Self:
        self.geometry_ = geometry
        self.mean_ = state.arrays["mean"].reshape(self.cap + 1)
        if self.cap >= NEVER:
            raise ValueError(f"cap {self.cap} is too large")
        return self
