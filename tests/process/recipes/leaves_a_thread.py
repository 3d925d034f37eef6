"""Importing this file leaves a thread behind, after which a fork would be unsafe."""

import threading

import tiny

recipe = tiny.recipe

threading.Thread(target=threading.Event().wait, daemon=True).start()
