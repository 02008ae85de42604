"""What the CUDA allocator says, attributed to verbs; the allocator is played here."""

import pytest
import torch

from longstraw.memory.meter import MemoryMeter
from longstraw.training.monitor import Monitor, Peaks, Progress


class Allocator:
    """Stands for the CUDA allocator's statistics: ``hold`` sets what is allocated now."""

    def __init__(self, monkeypatch):
        self.now = self.peak = self.reserved = 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: self.reserved)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "synchronize", self.settle)
        self.settled = 0

    def settle(self):
        self.settled += 1

    def reset(self):
        self.peak = self.reserved = self.now

    def hold(self, size):
        self.now = size
        self.peak = max(self.peak, size)
        self.reserved = max(self.reserved, 2 * size)


@pytest.fixture
def watch(tmp_path, monkeypatch):
    allocator = Allocator(monkeypatch)
    with MemoryMeter() as meter:
        watch = Monitor(meter, Progress(tmp_path / "progress.json"), backend="cuda")
        watch.start()
        yield watch, allocator


def test_verbs_have_their_own_peaks(watch):
    watch, allocator = watch
    allocator.hold(10)
    with watch.verb("prefill", 1):
        allocator.hold(50)
        allocator.hold(20)
    allocator.hold(15)
    with watch.verb("replay", 1):
        allocator.hold(80)
        allocator.hold(20)
    with watch.verb("replay", 1):
        allocator.hold(30)
    watch.peaks.collect()
    assert watch.peaks.by_verb == {"other": 30, "prefill": 50, "replay": 80}
    assert (watch.peaks.peak, watch.peaks.verb, watch.peaks.reserved) == (80, "replay", 160)
    assert watch.peaks.measured_by == "cuda"
    assert allocator.settled == 3  # the clock of a verb is read when its kernels are done


def test_what_is_aside_does_not_count(watch):
    watch, allocator = watch
    with watch.verb("prefill", 1):
        allocator.hold(50)
    with watch.aside():
        with watch.verb("prefill", 1):
            allocator.hold(500)
        allocator.hold(5)
    watch.peaks.collect()
    assert watch.peaks.peak == 50


def test_a_step_begins_with_what_is_held(watch):
    watch, allocator = watch
    allocator.hold(90)
    allocator.hold(40)
    watch.start()
    watch.peaks.collect()
    assert (watch.peaks.peak, watch.peaks.by_verb) == (40, {"other": 40})


def test_kinds_are_the_meters(watch):
    watch, _ = watch
    with watch.verb("replay", 1):
        x = torch.zeros(1000)
        watch.meter.tag("retained", x)
    watch.peaks.collect()
    assert watch.peaks.by_kind["retained"] == 4096


def test_a_processor_is_measured_by_storages(tmp_path):
    watch = Monitor(MemoryMeter(), Progress(tmp_path / "progress.json"))
    assert type(watch.peaks) is Peaks
    assert (watch.peaks.measured_by, watch.peaks.reserved) == ("storages", None)
