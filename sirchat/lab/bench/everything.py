"""Runs the usual benchmarks of one model, and describes the machine, for `sirchat bench all`."""

from __future__ import annotations

from sirchat.config.profile import Profile
from sirchat.lab.bench.decode import bench_decode
from sirchat.lab.bench.peers import peer_for
from sirchat.lab.bench.ratio import BenchOptions, bench_model, bench_record, load_unpacked
from sirchat.lab.bench.recall import bench_recall
from sirchat.lab.bench.record import machine
from sirchat.lab.bench.report import start_record
from sirchat.lab.bench.start import REPLY, bench_start
from sirchat.models.compiling import use_compiled
from sirchat.models.devices import use_threads

_LONG = 1000  # tokens of the text that is read after the start
_SEEN = (2_000, 10_000)  # tokens before the early and the late timing of decode
_ARCHIVED, _RETRIEVERS = 4_000, ("meaning", "words")


def bench_everything(profile: Profile, rounds: int, llama_cpp: str | None) -> dict[str, object]:
    """Run the benchmarks of start, decode, prefill and recall for the model of a profile.

    Raises ModelError if the model can't be loaded.
    """
    use_threads(profile.threads)  # llama.cpp gets as many threads
    options = BenchOptions(rounds=rounds, seen=_SEEN)
    with peer_for(profile.model, llama_cpp, _LONG + REPLY) as peer:
        starts = bench_start(profile, rounds, peer, [_LONG], with_chat=True)
        start = start_record(starts, profile.model, peer.note if peer else "")
    with peer_for(profile.model, llama_cpp, options.cache) as peer:
        model = bench_model(profile.model)
        use_compiled(model, profile.compile)
        bare = load_unpacked(model, profile)
        speeds = list(bench_decode(model, options, bare=bare, peer=peer))
    searches = list(bench_recall(model, options, [_ARCHIVED], _RETRIEVERS))
    return {
        "model": profile.model,
        "machine": machine(),
        "benchmarks": {
            "decode": bench_record(speeds, model, options),
            "start": start,
            "recall": bench_record(searches, model, options),
        },
    }
