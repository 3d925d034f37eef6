"""All that instep uses of torch that torch promises to nobody, and what each release of it has.

A new release of torch is tried with `make test-torch VERSION=...`. What it has renamed or dropped
fails here first, by name. Elsewhere in `src` no other private name of torch is used: the second
test finds those in imports and after `torch.`.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

NAMES = {
    "torch._C._distributed_c10d.Store": "its type; torch.distributed does not export it",
    "torch._C._disabled_torch_function_impl": "no tensor subclass to torch",
    "torch._C._swap_tensor_impl": "an absent tensor becomes the one that arrived",
    "torch.Tensor._make_wrapper_subclass": "an absent tensor has a shape and no values",
    "torch.utils._python_dispatch.TorchDispatchMode": "which random numbers a model draws",
    "torch.utils._pytree": "outputs of an evaluation in a loop of the user's own",
    "torch.utils.data._utils.worker": "get_worker_info() in a reader",
    "torch.utils.data._utils.worker._worker_info": "the same",
    "torch.autograd.Variable._execution_engine": "the end of a backward pass in a user's own loop",
    "torch.distributed.tensor.placement_types._StridedShard": "rows on two axes of a mesh",
    "torch.nn.modules.batchnorm._BatchNorm": "all kinds of BatchNorm",
    "torch.nn.modules.batchnorm._NormBase": "all kinds with running statistics",
    "torch._foreach_copy_": "copies of a commit in one call",
    "torch._foreach_norm": "the norm of gradients",
    "torch._foreach_lerp_": "moving averages of parameters",
    "torch._dynamo": "the compiler, which is imported late (`recipe/quick_start.py`)",
    "torch._dynamo.config.recompile_limit": "as many forms of a block as there are blocks",
    "torch._dynamo.eval_frame": "DTensors import it; a fork server does so beforehand",
    "torch._dynamo.callback.callback_handler": "whether something is compiled now",
    "torch._inductor.config.fallback_random": "the random numbers of code that is not compiled",
    "torch.distributed.ProcessGroupGloo._Options": "a group that listens on one address",
    "torch.distributed.ProcessGroupGloo._allgather_base": "into one tensor",
    "torch.distributed.ProcessGroupGloo._reduce_scatter_base": "from one tensor",
    "torch.distributed.ProcessGroupGloo._set_default_timeout": "exchanges wait without a limit",
    "torch.distributed.tensor.DTensor._local_tensor": "a rank's part, without a gradient",
    "torch.Tensor._version": "whether a tensor was changed in place",
    "torch.Tensor._base": "whether an output is a view",
    "torch.Tensor._backward_hooks": "whether a gradient is looked at",
    "torch.Tensor._indices": "rows of a sparse gradient",
    "torch.Tensor._nnz": "the same",
    "torch.nn.Module._apply": "a module is moved, or made on the meta device",
    "torch.nn.Module._compiled_call_impl": "a block on which `compile()` was called",
}
"""Each with what it is used for."""

SINCE = {
    "torch.distributed.fsdp.FSDPModule.set_reduce_scatter_unused_params": (2, 13),
    "torch.distributed.fsdp.FSDPModule.reset_iter_state": (2, 13),
}
"""What only newer releases have; `parallel/shard/sharded.py` refuses to shard without it."""

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def there(name: str) -> bool:
    """Whether torch has what `name` says, a module or an attribute of one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part) and part not in getattr(found, "__annotations__", {}):
                return False
            found = getattr(found, part, None)
        return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_this_torch_has_each_private_name_that_is_used(name):
    assert there(name), f"torch {torch.__version__} has no {name}: {NAMES[name]}"


@pytest.mark.parametrize("name", SINCE)
def test_this_torch_has_what_its_release_is_known_to_have(name):
    assert there(name) == (SINCE[name] <= RELEASE)


def private(name: str) -> bool:
    return any(re.match(r"_[^_]", part) for part in name.split("."))


def used(tree: ast.Module) -> Iterator[str]:
    """Private names of torch in imports, and after a name that was imported from torch."""
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("torch."))
    yield from known.values()
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in known:
            yield ".".join([known[node.id], *reversed(parts)])


@pytest.mark.tail
def test_no_other_private_name_of_torch_is_used():
    found = {
        (name, str(file.relative_to(ROOT)))
        for file in (ROOT / "src").rglob("*.py")
        for name in used(ast.parse(file.read_text("utf-8")))
        if private(name)
    }
    assert len(found) > 20
    known = [*NAMES, *SINCE]
    new = [
        (name, file)
        for name, file in sorted(found)
        if not any(
            f"{each}.".startswith(f"{name}.") or name.startswith(f"{each}.") for each in known
        )
    ]
    assert new == []
