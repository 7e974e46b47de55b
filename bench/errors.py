# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""The published table of errors beside ours: python bench/errors.py FILE

FILE is a document of `cofuse check published_error --json FILE`. Exit status 2 where it has none of
these cases.
"""

import json
import re
import sys

from crossover import head, table, words_of

ERROR = re.compile(r"^max (?:error )?(\S+?)(?:<=| OVER )")


def text_of(document):
    """Markdown; None where there is nothing to tell."""
    rows = []
    for case in document["cases"]:
        words = words_of(case["case"])
        if "published_error" not in words:
            continue
        found = ERROR.match(case["text"])
        rows.append([words["t"].replace(":", ", "), case["ranks"], found[1] if found else "-",
                     words["published_error"], case["verdict"]])
    if not rows:
        return None
    return f"{head(document)}\n\n" + table(
        ["T", "ranks", "largest error", "published", "verdict"], rows)


def main():
    if len(sys.argv) != 2:
        print("usage: errors.py FILE", file=sys.stderr)
        return 2
    with open(sys.argv[1]) as file:
        text = text_of(json.load(file))
    print(text or f"{sys.argv[1]}: no case with published_error",
          file=None if text else sys.stderr)
    return 0 if text else 2


if __name__ == "__main__":
    sys.exit(main())
