"""Lines of `instep check` for a terminal. Way in: `check_lines`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from instep.units import readable_bytes, readable_seconds
from instep.words import plural, printable

Table = Mapping[str, Any]
"""Findings of `lab.check`, as `--json` prints them."""

_MEMORY = {
    "model_bytes": "model",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "exchange_bytes": "exchange, beside gradients",
    "activation_bytes": "activations of a pass",
    "total_bytes": "together",
    "resident_bytes": "resident, of this process",
}
"""Parts of the memory of a worker, in the order in which they are shown."""


def check_lines(name: str, table: Table) -> list[str]:
    """The lines for one job.

    Args:
        name: of the job, as it was given.
        table: of the check.
    """
    return [printable(line) for line in _lines(name, table)]


def _lines(name: str, table: Table) -> Iterator[str]:
    refusals = table["refusals"]
    yield _line("check", name)
    why = f"no: {plural(len(refusals), 'refusal')}, exit code {table['exit_code']}"
    yield _line("starts", "yes" if table["starts"] else why)
    for number, each in enumerate(refusals):
        yield _line(f"refused {number + 1}", f"{each['stage']}: {each['text']}")
        if each["where"]:
            yield _line("", f"{each['where']}: {each['line']}")
    if found := table.get("same_as_one_machine"):
        yield _line("same", f"as one machine: {found['verdict']}")
        merged = "merged" if found["merged"] else "separate"
        yield _line("passes", f"micro-batches are {merged}: {found['reason']}")
    if "job" in table:
        yield from _of_job(table["job"])
    yield from _of_mesh(table.get("mesh", {}))
    yield from _of_data(table)
    yield from _of_model(table)
    for text in table["warnings"]:
        yield _line("warning", text)
    for text in table["not_tried"]:
        yield _line("not tried", text)


def _line(label: str, text: str) -> str:
    return f"{label:11}{text}"


def _of_job(job: Table) -> Iterator[str]:
    processes = plural(job["workers"], "worker")
    if job["servers"]:
        processes += f" and {plural(job['servers'], 'server')}"
    codec = f", codec {job['codec']}" if job["codec"] != "none" else ""
    how = f"determinism {job['determinism']}, {job['precision']}"
    yield _line("job", f"{job['strategy']} on {processes}{codec}; {how}")
    axes = [f"{axis} = {size}" for axis, size in job["mesh"].items() if size > 1]
    if axes:
        of = plural(job["replicas"], "replica")
        yield _line("mesh", f"{', '.join(axes)}: {of} of {job['workers'] // job['replicas']}")


def _of_mesh(mesh: Table) -> Iterator[str]:
    if cuts := mesh.get("cuts"):
        yield _line("stages", f"begin with the first module, {', '.join(cuts)}")
    if layers := mesh.get("tensor"):
        told = ", ".join(f"{name} by {style}" for name, style in layers.items())
        yield _line("tensor", f"cuts {told}")


def _of_data(table: Table) -> Iterator[str]:
    if data := table.get("data"):
        validate = f", {data['validate']:,} to validate on" if data["validate"] else ""
        yield _line("data", f"{plural(data['train'], 'sample')} to train on{validate}")
        label = "holds"
        for each in data["batch"]:
            shape = f" {each['shape']}" if each["shape"] is not None else ""
            yield _line(label, f"{each['name']}: {each['dtype']}{shape}")
            label = ""
    if batches := table.get("batches"):
        yield _line("batch", _of_batch(batches))
        if (steps := _of_steps(batches)) is not None:
            yield _line("steps", steps)


_SEVERAL = {"micro-batch": "micro-batches", "participant": "participants"}


def _of_batch(batches: Table) -> str:
    sizes, unit = batches["part_samples"], batches["unit"]
    of = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[-1]:,} to {sizes[0]:,}"
    local = f" in each of {batches['local_steps']} local steps" if batches["local_steps"] else ""
    parts, most = (f"{n:,} {unit if n == 1 else _SEVERAL[unit]}" for n in _of_all_and_one(batches))
    tokens, batch = batches.get("tokens_per_batch"), plural(batches["global_batch"], "sample")
    batch = f"at most {tokens:,} tokens on average" if tokens else batch
    return f"{batch}{local}, as {parts} of {of} samples; a worker has at most {most}"


def _of_all_and_one(batches: Table) -> tuple[int, int]:
    return batches["parts"], batches["of_a_worker"]


def _of_steps(batches: Table) -> str | None:
    if "steps_per_epoch" not in batches:
        return None
    commits = "round" if batches["local_steps"] else "step"
    epochs = f" in {plural(batches['epochs'], 'epoch')}" if batches["epochs"] else ""
    text = f"{plural(batches['steps'], commits)}{epochs}, {batches['steps_per_epoch']:,} an epoch"
    last = f"the last of {plural(batches['last_batch'], 'sample')}"
    return f"{text}, {last} in {batches['last_batch_parts']} parts"


def _of_model(table: Table) -> Iterator[str]:
    if model := table.get("model"):
        size = readable_bytes(model["parameter_bytes"])
        yield _line("model", f"{model['type']}: {model['parameters']:,} parameters, {size}")
        if model["trained"] != model["parameters"]:
            share = readable_bytes(model["trained_bytes"])
            yield _line("", f"{model['trained']:,} of them are trained, {share}")
        if model["buffers"]:
            size = readable_bytes(model["buffer_bytes"])
            yield _line("", f"{model['buffers']:,} numbers in buffers, {size}")
    if optimizer := table.get("optimizer"):
        size = readable_bytes(optimizer["state_bytes"])
        yield _line("optimizer", f"{optimizer['name']}: {size} of state")
    if memory := table.get("memory"):
        label = "memory"
        for key, name in _MEMORY.items():
            if (size := memory.get(key)) is not None:
                yield _line(label, f"{name:28}{readable_bytes(size):>9}")
                label = ""
    if sent := table.get("sent"):
        size = readable_bytes(sent["sent_bytes"])
        yield _line("sent", f"{size} by each worker in each agreement")
    if times := table.get("times"):
        yield from _of_times(times)


def _of_times(times: Table) -> Iterator[str]:
    one, update = readable_seconds(times["pass_s"]), readable_seconds(times["update_s"])
    whole = times["global_batch_s"]
    merged = f", of a global batch {readable_seconds(whole)}" if whole is not None else ""
    threads = plural(times["threads"], "thread")
    yield _line("time", f"a pass of one micro-batch {one}{merged}, an update {update}; {threads}")
    epoch = readable_seconds(times["epoch_s"])
    yield _line("", f"an epoch on one machine, roughly {epoch}; without reading and validation")
