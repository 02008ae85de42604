"""Measure a step while it runs: seconds and peak memory by verb, and a progress file for ``longstraw.status``."""

from __future__ import annotations

import copy
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch

from longstraw.memory.meter import NO_VERB, MemoryMeter
from longstraw.observer import Holder, Observer
from longstraw.parallel.comm_meter import TrafficMeter
from longstraw.runtime.preemption import Stop
from longstraw.runtime.whole_files import write_whole

PROGRESS_SECONDS = 0.5  # between two writes of the progress file


class Progress:
    """Write ``progress.json``: verb, positions done and in total, and step. Without a path nothing is written."""

    def __init__(self, path: Path | None):
        self.path, self.step = path, 0
        self._verb, self._done, self._total, self._written = "", 0, 0, 0.0

    def start(self, verb: str, total: int) -> None:
        self._verb, self._done, self._total = verb, 0, total
        self._write()

    def advance(self, positions: int) -> None:
        self._done += positions
        if time.monotonic() - self._written >= PROGRESS_SECONDS:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        if self.path is None:
            return
        content = {"step": self.step, "verb": self._verb, "done": self._done, "total": self._total}
        with suppress(OSError):  # a progress file that cannot be written does not stop the run
            write_whole(self.path, json.dumps(content))


class Peaks:
    """The peak memory of a step, by the meter's count of storages; measuring can be paused with ``aside``."""

    measured_by = "storages"
    reserved: int | None = None

    def __init__(self, meter: MemoryMeter):
        self.meter = meter
        self.start()

    def start(self) -> None:
        self.meter.reset_peak()
        self.peak, self.verb, self.host = 0, "", 0
        self.by_kind: dict[str, int] = {}
        self.by_verb: dict[str, int] = {}

    def collect(self) -> None:
        """Take over the meter's peaks where they are higher."""
        for verb, peak in self.meter.peak_by_verb.items():
            self.by_verb[verb] = max(peak, self.by_verb.get(verb, 0))
        if self.meter.peak > self.peak:
            self.peak, self.verb = self.meter.peak, self.meter.peak_verb
            self.by_kind = self.meter.peak_bytes_by_kind
        self.host = max(self.meter.host_peak, self.host)

    @contextmanager
    def during(self, verb: str) -> Iterator[None]:
        """Attribute the peak within this block to ``verb``."""
        with self.meter.verb(verb):
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the peak within this block out."""
        self.collect()
        before = {name: copy.copy(value) for name, value in vars(self).items() if name != "meter"}
        try:
            yield
        finally:
            vars(self).update(before)
            self._reset()

    def synchronize(self) -> None:
        """Wait for the device before a clock is read."""

    def _reset(self) -> None:
        self.meter.reset_peak()


class CudaPeaks(Peaks):
    """The peak according to the CUDA allocator; its parts by kind are still the meter's count."""

    measured_by = "cuda"

    def start(self) -> None:
        super().start()
        self.counted, self.reserved = 0, 0
        self._verb = NO_VERB
        self._reset()

    def collect(self) -> None:
        peak = torch.cuda.max_memory_allocated()
        self.by_verb[self._verb] = max(peak, self.by_verb.get(self._verb, 0))
        if peak > self.peak:
            self.peak, self.verb = peak, self._verb
        self.reserved = max(torch.cuda.max_memory_reserved(), self.reserved or 0)
        if self.meter.peak > self.counted:
            self.counted, self.by_kind = self.meter.peak, self.meter.peak_bytes_by_kind
        self.host = max(self.meter.host_peak, self.host)

    @contextmanager
    def during(self, verb: str) -> Iterator[None]:
        self._switch(verb)
        try:
            with self.meter.verb(verb):
                yield
        finally:
            self._switch(NO_VERB)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def _reset(self) -> None:
        super()._reset()
        torch.cuda.reset_peak_memory_stats()

    def _switch(self, verb: str) -> None:
        self.collect()
        self._verb = verb
        torch.cuda.reset_peak_memory_stats()


class Monitor(Observer):
    """Passes what the step reports to the meter, the clock and the progress file."""

    def __init__(
        self,
        meter: MemoryMeter,
        progress: Progress,
        stop: Stop | None = None,
        traffic: TrafficMeter | None = None,
        *,
        backend: str = "cpu",
    ):
        """``traffic`` counts the bytes that several ranks send; ``backend`` decides how memory is measured."""
        self.meter, self.progress, self.traffic = meter, progress, traffic
        self.peaks = CudaPeaks(meter) if backend == "cuda" else Peaks(meter)
        self.stop = stop or Stop()
        self.seconds: dict[str, float] = {}
        self.most: dict[str, int] = {}  # the most bytes of a kind, host memory too, at the ends of chunks and branches

    def start(self) -> None:
        """Begin a step: clocks at zero, peaks from what is held now."""
        self.seconds, self.most = {}, {}
        self.peaks.start()
        if self.traffic is not None:
            self.traffic.reset()

    @contextmanager
    def verb(self, name: str, positions: int) -> Iterator[None]:
        self.progress.start(name, positions)
        begun = time.perf_counter()
        try:
            with self.peaks.during(name), self.traffic.verb(name) if self.traffic is not None else nullcontext():
                yield
        finally:
            self.peaks.synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

    def advance(self, positions: int) -> None:
        self.progress.advance(positions)
        self.stop.check()  # between two chunks or branches

    def holds(self, states: Sequence[Holder]) -> None:
        for state in states:
            for kind, tensor in state.held():
                self.meter.tag(kind, tensor)
        self.note()

    def note(self) -> None:
        """Update the maximum of each kind with what it holds now."""
        on_host = self.meter.host_bytes_by_kind()
        for kind, size in self.meter.bytes_by_kind().items():
            self.most[kind] = max(size + on_host[kind], self.most.get(kind, 0))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave this block out of the step's seconds and peak, for measurements that are not part of the step."""
        seconds, most = dict(self.seconds), dict(self.most)
        sent = Counter(self.traffic.sent) if self.traffic is not None else None
        try:
            with self.peaks.aside():
                yield
        finally:
            self.seconds, self.most = seconds, most
            if self.traffic is not None and sent is not None:
                self.traffic.sent = sent
