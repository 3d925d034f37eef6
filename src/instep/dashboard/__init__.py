"""A live page for runs in the browser: a process of its own that reads run folders, writes none.

    tail.py        what is new in a file that grows
    fold.py        least, mean and most of a curve of any length
    live.py        a run that trains, read as it grows
    settled.py     a run that has ended, with the figures of its report
    sections.py    both as the parts of a page, plain data
    watch.py       what is pushed to the open pages, and when
    access.py      who may read it
    app.py, serve.py   the HTTP server

`starlette` and `uvicorn` are imported in `app.py`, `guard.py` and `serve.py` only. Way in:
`serve.serve`.
"""
