"""Command line of the fuzzer: run many cases, count the outcomes, and print the failures."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch

from .cases import Task, run_task
from .minimise import minimise_failure
from .network import build_network
from .site import KINDS
from .trial import BAD, FAILED, FINE, INVALID, NO_EFFECT, REFUSED, TRACEBACK, WORSE, WRONG, Outcome

MERGERS = {"none": ("none",), "default": ("default",), "both": ("none", "default")}


def main() -> None:
    args = parse_arguments()
    cases = range(args.first, args.first + args.graphs) if args.case is None else [args.case]
    without = frozenset(args.without.split(","))
    tasks = [Task(args.seed, index, args.deepest, without, MERGERS[args.merger]) for index in cases]
    start, outcomes = time.perf_counter(), []
    with suppress(KeyboardInterrupt):  # the summary covers what was run until then
        for outcome in run_tasks(tasks, args.jobs):
            outcomes.append(outcome)
            print_progress(outcome, outcomes, args.minimise)
    if args.case is not None:
        print_outcomes(outcomes)
    print(format_summary(outcomes, time.perf_counter() - start, args.verbose))


def print_progress(outcome: Outcome, outcomes: list[Outcome], shorten: bool) -> None:
    """Print a failure at once, and the counts after every 250 cases."""
    if outcome.kind in BAD:
        print(describe_failure(outcome, shorten), flush=True)
    if len(outcomes) % 250 == 0:
        print(f"… {len(outcomes)}: {dict(Counter(o.kind for o in outcomes))}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--deepest", type=int, default=8, help="the largest number of blocks; 1: every kind by itself")
    parser.add_argument("--without", default="", help="kinds to leave out, with commas between")
    parser.add_argument("--merger", choices=MERGERS, default="none")
    parser.add_argument("--case", type=int, help="run this case alone, and show it")
    parser.add_argument("--minimise", action="store_true", help="shorten every failure")
    parser.add_argument(
        "--verbose", action="store_true", help="reasons of refusals, and kinds in which nothing was cut"
    )
    return parser.parse_args()


def run_tasks(tasks: list[Task], jobs: int) -> Iterator[Outcome]:
    """Yield the outcomes in order; with several jobs, from worker processes."""
    if jobs == 1:
        torch.set_num_threads(1)
        for task in tasks:
            yield from run_task(task)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(jobs, torch.set_num_threads, (1,), maxtasksperchild=500) as pool:
        for found in pool.imap(run_task, tasks, chunksize=4):
            yield from found


def describe_failure(outcome: Outcome, shorten: bool) -> str:
    text = f"{outcome.kind.upper()} {outcome.recipe.seed} [{outcome.merger}] {outcome.detail}"
    if shorten:
        outcome = minimise_failure(outcome)
        text += f"\n    shortest: {outcome.detail}"
    return f"{text}\n    {outcome.recipe}\n    {' '.join(outcome.applied)}"


def print_outcomes(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        print(outcome)
    print(build_network(outcomes[0].recipe).model)


def format_summary(outcomes: list[Outcome], seconds: float, verbose: bool) -> str:
    lines = [f"{len(KINDS)} kinds of blocks, {len({o.recipe.seed for o in outcomes})} graphs, {seconds:.0f} s"]
    for merger in sorted({o.merger for o in outcomes}):
        counts = Counter(o.kind for o in outcomes if o.merger == merger)
        kinds = (FINE, REFUSED, FAILED, TRACEBACK, WRONG, WORSE, INVALID)
        lines.append(f"merger {merger}: " + ", ".join(f"{counts[kind]} {kind}" for kind in kinds))
        quiet = sum(o.detail == NO_EFFECT for o in outcomes if o.merger == merger)
        lines += [f"    {quiet} of the fine without power: {NO_EFFECT}"] if quiet else []
    return "\n".join(lines + (list(iterate_details(outcomes)) if verbose else []))


def iterate_details(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield lines on refused cases, and on kinds of blocks that were never used or never cut."""
    outcomes = list(outcomes)
    for outcome in outcomes:
        if outcome.kind in (REFUSED, INVALID):
            yield f"{outcome.kind} {outcome.recipe.seed} {' '.join(outcome.applied)}: {outcome.detail}"
    seen, cut = Counter(k for o in outcomes for k in o.applied), Counter(k for o in outcomes for k in o.cut)
    yield "never placed: " + ", ".join(sorted(set(KINDS) - set(seen)))
    yield "never cut: " + ", ".join(f"{k} ({n})" for k, n in sorted(seen.items()) if not cut[k])


if __name__ == "__main__":
    main()
