"""`tiny.py`, in a process that the system gives no more memory, and so no thread."""

import resource

import tiny

import instep


def recipe() -> instep.Recipe:
    made = tiny.recipe()
    resource.setrlimit(resource.RLIMIT_AS, (10 << 20, 10 << 20))
    return made
