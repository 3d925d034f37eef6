"""Blocks of a model that run as compiled code (`torch.compile`), each by itself.

Only what a block computes is compiled: hooks of FSDP2, and those that keep ranks in step, stay
outside. Works with and without sharding; before `checkpoint_blocks` and `shard`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import RecipeError, SpecError
from instep.parallel.blocks import repeated_blocks
from instep.parallel.recompute import without_caches

_COMPILING = threading.Event()

_FORMS = 8
"""In how many forms a block may be compiled: for sizes of batches, training or not."""


def compile_blocks(model: nn.Module, device: torch.device, *, every: bool) -> None:
    """Have blocks of `repeated_blocks` train with compiled code, in place.

    Names, parameters and classes stay as they are. Random numbers are those of the code as it is
    written. Without gradients that code runs.

    Args:
        model: whole.
        device: where it computes.
        every: all blocks; else those on which the recipe has called `compile()`. These keep its
            options.

    Raises:
        RecipeError: the model is compiled as a whole, or has no repeated blocks.
        SpecError: torch cannot compile on this machine.
    """
    blocks = repeated_blocks(model)
    _refuse_whole(model, blocks)
    given = {
        name: block.__dict__.pop("_compiled_call_impl", None) for name, block in blocks.items()
    }
    chosen = [name for name in blocks if every or given[name] is not None]
    if every and not blocks:
        raise RecipeError(
            "mesh.compile = 'blocks', but the model has no list of repeated blocks "
            "(a ModuleList or Sequential of modules of one class): leave the key out."
        )
    if not chosen:
        return
    import torch._dynamo
    import torch._inductor.config

    torch._inductor.config.fallback_random = True
    limit = max(torch._dynamo.config.recompile_limit, _FORMS * len(chosen))
    torch._dynamo.config.recompile_limit = limit  # beyond it blocks are no longer compiled
    compiling()  # from here on it is known
    _check_compiler(_compiler(given[chosen[0]]), device)
    for name in chosen:
        block = blocks[name]
        written = block.forward
        compiled = _compiler(given[name])(written)
        block.__dict__["forward"] = functools.partial(_forward, compiled, written)


def compiling() -> bool:
    """Whether torch compiles something now; for another thread, which asks again and again.

    What is under way at the first call is not seen.
    """
    callback = sys.modules.get("torch._dynamo.callback")  # nothing is compiled without it
    handler = getattr(callback, "callback_handler", None)
    if handler is not None and _begins not in handler.start_callbacks:
        _COMPILING.clear()  # also after a reset of torch's, which drops callbacks
        handler.register_start_callback(_begins)
        handler.register_end_callback(_ends)
    return _COMPILING.is_set()


def _begins(_: Any) -> None:
    _COMPILING.set()


def _ends(_: Any) -> None:
    _COMPILING.clear()


def _forward(
    compiled: Callable[..., Any], written: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    if not torch.is_grad_enabled():
        return written(*arguments, **options)
    return compiled(*arguments, **without_caches(options))


def _refuse_whole(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    for name, module in model.named_modules():
        inside = [block for block in blocks if not name or block.startswith(f"{name}.")]
        if inside and (module._compiled_call_impl is not None or "_orig_mod" in module._modules):
            what = f"the module {name!r}" if name else "the model"
            raise RecipeError(
                f"{what} is compiled as a whole, but with [mesh] its blocks ({inside[0]!r}, ...) "
                "are gathered one at a time. Leave compile() out of the recipe, and set "
                "mesh.compile = 'blocks'; or call compile() on each block."
            )


def _compiler(given: Callable[..., Any] | None) -> Callable[[Callable[..., Any]], Any]:
    """What compiles a function as `Module.compile` was told to; by default as torch does."""
    if given is not None and given.__closure__ is not None:
        held = dict(zip(given.__code__.co_freevars, given.__closure__, strict=True))
        if "self" in held:  # of torch 2.13: what torch.compile made for its options
            context: Callable[[Callable[..., Any]], Any] = held["self"].cell_contents
            return context
    return torch.compile


def _check_compiler(compiler: Callable[[Callable[..., Any]], Any], device: torch.device) -> None:
    """Compile something small, so that no step is the first to find that it cannot be done."""
    try:
        compiler(_small)(torch.ones(2, device=device, requires_grad=True)).sum().backward()
    except Exception as error:  # whatever a compiler raises
        first = str(error).strip().partition("\n")[0]
        raise SpecError(
            f"torch.compile does not work on this machine ({first}). On the CPU it needs a C++ "
            "compiler such as g++, on a GPU Triton: install it, or leave mesh.compile and "
            "compile() out."
        ) from error


def _small(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2
