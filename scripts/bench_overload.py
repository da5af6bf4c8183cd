#!/usr/bin/env python3
"""What is left of the goodput under too much load: STERLING=... [PEER=...] [SECONDS=60] scripts/bench_overload.py

The peak, then 3 and 10 times the rate that is followed, then the same beside 2,000 idle connections and 200 slow readers. The verdicts
are those of STERLING; a PEER is measured after it with the same generator (BENCH, which is STERLING where it is not set).
"""

import resource

from served import Server, bench, binaries, finish, header, requests_file, row, seconds, store, users, verdict

TIMEOUT_MS = 1000
CONNECTIONS = 8192


def run(server, requests, rate, *more):
    _, cpu, _ = server.stat()
    line = bench(server.url, "--requests", requests, "--rate", rate, "--seconds", seconds(60), "--connections", CONNECTIONS, *more)[0]
    line["server_cores"] = (server.stat()[1] - cpu) / line["seconds"]
    return line


def judge(name, line, peak, share):
    main = line["classes"][0]
    answered, refused = main["answered_ms"] or {"p99": float("inf")}, main["refused_ms"]
    verdict(line["void"] is None, f"{name}: the run counts ({line['void'] or 'the schedule was kept'})")
    verdict(main["goodput"] >= share * peak, f"{name}: goodput {main['goodput']:.0f}/s, {main['goodput'] / peak:.1%} of the peak, expected {share:.0%}")
    verdict(refused is None or refused["p50"] < 5, f"{name}: median time of a 503 {refused and refused['p50']} ms, expected < 5")
    verdict(answered["p99"] <= TIMEOUT_MS, f"{name}: p99 of the answered {answered['p99']:.1f} ms, the deadline is {TIMEOUT_MS}")
    lost = [main["timed_out"], main["no_answer"], main["no_connection"]]
    verdict(sum(lost) == 0, f"{name}: {lost[0]} of 504, {lost[1]} without an answer, {lost[2]} without a connection, expected 0")
    verdict(main["errors"] + main["other"] == 0, f"{name}: {main['errors']} connection errors, {main['other']} other answers, expected 0")


def main():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    requests = requests_file("users", users())
    everything = ["--idle-connections", 2000, "--slow-readers", 200]
    header("server", "load", "rate", "goodput", "% of peak", "200 p50", "200 p99", "503", "503 p50 ms", "504", "other", "server cores", "generator cores", "void")
    for number, (name, binary) in enumerate(binaries().items()):
        with Server(binary, store(binary, name)) as server:
            bench(server.url, "--requests", requests, "--rate", 100, "--seconds", 2)
            steps = bench(server.url, "--requests", requests, "--find-peak", "--rate", 100, "--seconds", min(5, seconds(60)), "--connections", CONNECTIONS)
            peak = steps[-1]["peak"]
            row(name, "peak", peak["rate"], peak["goodput"], *[""] * 10)
            loads = [("3 x", 3, []), ("10 x", 10, []), ("3 x, bad neighbours", 3, everything), ("10 x, bad neighbours", 10, everything)]
            results = []
            for load, factor, more in loads:
                line = run(server, requests, factor * peak["rate"], *more)
                main = line["classes"][0]
                answered, refused = main["answered_ms"] or {}, main["refused_ms"] or {}
                row(
                    name, load, main["rate"], main["goodput"], 100 * main["goodput"] / peak["goodput"], answered.get("p50", ""), answered.get("p99", ""),
                    main["refused"], refused.get("p50", ""), main["timed_out"], main["other"] + main["errors"] + main["no_answer"] + main["no_connection"] + main["unsent"],
                    line["server_cores"], line["generator"]["cores"], line["void"] or "",
                )  # fmt: skip
                results.append((load, line, peak["goodput"], 0.95 if factor == 3 else 0.85))
            if number == 0:
                for result in results:
                    judge(*result)
    finish()


main()
