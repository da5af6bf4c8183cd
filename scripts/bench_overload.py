#!/usr/bin/env python3
"""Measures the fraction of the peak goodput that remains under overload.

    STERLING=... [PEER=...] [SECONDS=60] [ROUNDS=3] scripts/bench_overload.py

Finds the highest rate that the server sustains. Then measures, alternating, SECONDS of each load in ROUNDS parts: that rate, 3 and 10
times that rate, and these rates with 2,000 idle connections and 200 slow readers. A fraction of the peak is the median over rounds of the
goodput divided by the goodput at the peak rate in the same round, because the speed of a machine varies. The verdicts apply to STERLING;
a PEER is measured after STERLING with the same generator (BENCH, by default STERLING).
"""

import os
import resource

from served import Server, bench, binaries, finish, header, median, requests_file, row, seconds, store, users, verdict

TIMEOUT_MS = 1000
CONNECTIONS = 8192
ROUNDS = int(os.environ.get("ROUNDS", 3))
NEIGHBOURS = ["--idle-connections", 2000, "--slow-readers", 200]
# Loads by name: multiple of the peak rate, concurrent clients, and minimum fraction of the peak goodput.
LOADS = {
    "peak": (1, [], 0.0),
    "3 x": (3, [], 0.95),
    "10 x": (10, [], 0.85),
    "3 x, bad neighbours": (3, NEIGHBOURS, 0.95),
    "10 x, bad neighbours": (10, NEIGHBOURS, 0.85),
}


def run(server, requests, rate, more):
    """Runs one round of a load."""
    _, cpu, _ = server.stat()
    line = bench(server.url, "--requests", requests, "--rate", rate, "--seconds", seconds(60) / ROUNDS, "--connections", CONNECTIONS, *more)[0]
    counts = line["classes"][0]
    return counts | {
        "void": line["void"],
        "server_cores": (server.stat()[1] - cpu) / line["seconds"],
        "generator_cores": line["generator"]["cores"],
        "unanswered": counts["no_answer"] + counts["no_connection"] + counts["unsent"],
    }


def together(rounds, peaks):
    """Aggregates the rounds of a load: medians of rates and medians, maxima of tails, sums of counts."""
    total = {name: sum(line[name] for line in rounds) for name in ("refused", "timed_out", "unanswered", "errors", "other")}
    middle = {name: median([line[name] for line in rounds]) for name in ("rate", "goodput", "server_cores", "generator_cores")}
    answered = [line["answered_ms"] for line in rounds if line["answered_ms"]]
    refused = [line["refused_ms"]["p50"] for line in rounds if line["refused_ms"]]
    return total | middle | {
        "share": median([line["goodput"] / peak["goodput"] for line, peak in zip(rounds, peaks)]),
        "p50": median([times["p50"] for times in answered]) if answered else float("inf"),
        "p99": max((times["p99"] for times in answered), default=float("inf")),
        "refused_p50": median(refused) if refused else 0.0,
        "void": next((line["void"] for line in rounds if line["void"]), None),
    }  # fmt: skip


def judge(name, load, share):
    verdict(load["void"] is None, f"{name}: the run counts ({load['void'] or 'the schedule was kept'})")
    verdict(load["share"] >= share, f"{name}: goodput {load['goodput']:.0f}/s, {load['share']:.1%} of the peak, expected {share:.0%}")
    verdict(load["refused_p50"] < 5, f"{name}: median time of a 503 {load['refused_p50']} ms, expected < 5")
    verdict(load["p99"] <= TIMEOUT_MS, f"{name}: p99 of the answered {load['p99']:.1f} ms, the deadline is {TIMEOUT_MS}")
    verdict(load["timed_out"] + load["unanswered"] == 0, f"{name}: {load['timed_out']} of 504, {load['unanswered']} without an answer, expected 0")
    verdict(load["errors"] + load["other"] == 0, f"{name}: {load['errors']} connection errors, {load['other']} other answers, expected 0")


def main():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    requests = requests_file("users", users())
    header("server", "load", "rate", "goodput", "% of peak", "200 p50", "200 p99", "503", "503 p50 ms", "504", "other", "server cores", "generator cores", "void")
    for number, (name, binary) in enumerate(binaries().items()):
        with Server(binary, store(binary, name)) as server:
            bench(server.url, "--requests", requests, "--rate", 100, "--seconds", 2)
            steps = bench(server.url, "--requests", requests, "--find-peak", "--rate", 100, "--seconds", min(5, seconds(60)), "--connections", CONNECTIONS)
            rate = steps[-1]["peak"]["rate"]
            rounds = [{load: run(server, requests, factor * rate, more) for load, (factor, more, _) in LOADS.items()} for _ in range(ROUNDS)]
            peaks = [found["peak"] for found in rounds]
            for load, (_, _, share) in LOADS.items():
                result = together([found[load] for found in rounds], peaks)
                row(
                    name, load, result["rate"], result["goodput"], 100 * result["share"], result["p50"], result["p99"], result["refused"], result["refused_p50"],
                    result["timed_out"], result["other"] + result["errors"] + result["unanswered"], result["server_cores"], result["generator_cores"], result["void"] or "",
                )  # fmt: skip
                if number == 0:
                    judge(load, result, share)
    finish()


main()
