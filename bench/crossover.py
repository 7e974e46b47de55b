# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Where two-shot takes over from one-shot: python bench/crossover.py FILE

FILE is a document of `cofuse bench 'name=crossover ' --device cuda --json FILE`, or of other cases
of allreduce_rmsnorm that name an algorithm. Prints, as Markdown, a table for each rank count and H,
the sizes at which the medians cross, and the default of the plans. Exit status 2 where no case
names one.
"""

import json
import math
import sys

ITEM = {"bf16": 2, "f16": 2, "f32": 4}
ONE, TWO = "one_shot", "two_shot"
# Words that make another call of it.
OTHER = {"variant", "rounding", "x", "one_shot_bytes"}


def words_of(line):
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def head(document):
    """When and where it was measured."""
    machine = document["machine"]
    where = f"{machine['gpus']} x {machine['gpu']}" if machine.get("gpus") else machine["cpu"]
    return f"{where}; cofuse {document['version']}, {document['date'][:10]}."


def table(names, rows):
    """Markdown."""
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(map(str, cells)) + " |" for cells in rows])


def groups_of(document):
    """{(ranks, devices, H, type): (bytes of a row, {T: {algorithm: seconds}}, default or None)}.
    Of several results for the same place the last counts.

    The default is (one_shot_rows, max_tokens) of the plan with the most max_tokens."""
    groups = {}
    for result in document["results"]:
        case, plan = words_of(result["case"]), words_of(result["plan"])
        if not result["case"].startswith("allreduce_rmsnorm ") or OTHER.intersection(case) or \
                case.get("how") != "graph":  # eager calls tell of the host
            continue
        hidden, algorithm = int(case["H"]), case.get("algorithm", "auto")
        dtype = case.get("dtype", "bf16")
        key = result["ranks"], result.get("devices", 0), hidden, dtype
        row_bytes, medians, default = groups.get(key, (0, {}, None))
        row_bytes = hidden * ITEM[dtype]
        if algorithm != "auto":
            medians.setdefault(int(case["T"]), {})[algorithm] = result["median_s"]
        elif "one_shot_rows" in plan:
            n_tokens = int(plan["max_tokens"])
            if not default or n_tokens > default[1]:
                default = plan["one_shot_rows"], n_tokens
        groups[key] = row_bytes, medians, default
    return groups


def crossings(points):
    """Sizes at which `points`, (bytes, seconds of one-shot, of two-shot) by size, change sides.

    Between two sizes the ratio is taken to be a power of the size. A tie is two-shot's."""
    found = []
    for (size, one, two), (next_size, next_one, next_two) in zip(points, points[1:]):
        before, after = math.log(two / one), math.log(next_two / next_one)
        if (before > 0) != (after > 0):
            share = before / (before - after)
            found.append(size * (next_size / size) ** share)
    return found


def verdict(points, row_bytes):
    """What the medians say, in a sentence."""
    if not points:
        return "No size has both."
    found, sizes = crossings(points), [p[0] for p in points]
    first = "One-shot" if points[0][2] > points[0][1] else "Two-shot"
    if not found:
        return f"{first} is faster at every size from {sizes[0]} to {sizes[-1]} bytes."
    places = ", ".join(f"{size:.0f} bytes ({size / row_bytes:.1f} rows)" for size in found)
    if len(found) > 1:
        return f"They cross {len(found)} times: {places}; the medians are too close there."
    return f"{first} is faster below {places}, the other above."


def default_text(default, row_bytes):
    if not default:
        return "No plan tells its default."
    rows, n_tokens = default
    if rows == "all":
        return f"Default: one-shot at every size, up to max_tokens = {n_tokens}."
    return f"Default: one-shot up to {rows} rows, {int(rows) * row_bytes} bytes."


def group_text(key, row_bytes, medians, default):
    n_ranks, n_devices, hidden, dtype = key
    rows, points = [], []
    for n_tokens in sorted(medians):
        one, two = (medians[n_tokens].get(name) for name in (ONE, TWO))
        cells = [f"{m * 1e6:.2f}" if m else "-" for m in (one, two)]
        if one and two:
            points.append((n_tokens * row_bytes, one, two))
        rows.append([n_tokens, n_tokens * row_bytes, *cells,
                     f"{two / one:.2f}" if one and two else "-"])
    shared = ", which share them" if n_devices < n_ranks else ""
    kind = "" if dtype == "bf16" else f", {dtype}"
    return "\n\n".join([
        f"{n_ranks} ranks on {n_devices} devices{shared}, H = {hidden}{kind}:",
        table(["T", "bytes", "one-shot us", "two-shot us", "two-shot / one-shot"], rows),
        f"{verdict(points, row_bytes)} {default_text(default, row_bytes)}",
    ])


def text_of(document):
    """None where there is nothing to tell."""
    groups = groups_of(document)
    groups = {key: group for key, group in groups.items() if group[1]}
    if not groups:
        return None
    return "\n\n".join([head(document), *(group_text(k, *groups[k]) for k in sorted(groups))])


def main():
    if len(sys.argv) != 2:
        print("usage: crossover.py FILE", file=sys.stderr)
        return 2
    with open(sys.argv[1]) as file:
        text = text_of(json.load(file))
    print(text or f"{sys.argv[1]}: no case names an algorithm", file=None if text else sys.stderr)
    return 0 if text else 2


if __name__ == "__main__":
    sys.exit(main())
