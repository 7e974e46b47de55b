# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Prints a stored document as Markdown: python bench/peers/show.py FILE

The table is made by table_of() of the program that the document's command names; torch is not
needed.
"""

import importlib
import json
import pathlib
import sys
import textwrap


def head_of(document):
    """When, where and with what it was measured."""
    machine = document["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores"
    gpus = machine.get("gpus")
    if gpus:
        names = " and ".join(f"{gpus.count(g)} x {g}" for g in dict.fromkeys(gpus))
        where = f"{names}; {where}"
    if 0 < document.get("devices", 0) < document["settings"]["ranks"]:
        where = (f"{document['settings']['ranks']} ranks on {document['devices']} GPUs, of which "
                 f"some share one, so that times tell nothing of as many GPUs; {where}")
    versions = document.get("versions", {k: document.get(k) for k in ("torch", "python")})
    versions = ", ".join(f"{k} {v}" for k, v in versions.items())
    return f"`{document['command']}`, {document['date'][:10]}; {where}; {versions}."


def main():
    with open(sys.argv[1]) as file:
        document = json.load(file)
    program = pathlib.Path(document["command"].split()[1])
    table = importlib.import_module(program.stem).table_of(document)
    head = textwrap.fill(head_of(document), 100, break_long_words=False, break_on_hyphens=False)
    print(f"{head}\n\n{table}")


if __name__ == "__main__":
    sys.exit(main())
