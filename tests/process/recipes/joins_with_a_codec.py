"""A recipe with a codec whose options are left out; begun, and gone on with. Folder of runs."""

import sys

import tiny

import instep

if __name__ == "__main__":
    for epochs in (1, 2):
        session = instep.join(
            tiny.recipe,
            name="coded",
            runs=sys.argv[1],
            train={"epochs": epochs, "global_batch": 16},
            sync={"codec": "int4", "options": {"encode_vectors": True}},
            quiet=True,
            resume=True,
        )
        for _ in session.steps():
            pass
