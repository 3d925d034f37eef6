"""Tensor plans written by hand with torch's own styles, and a count of what a pass sends."""

from collections import Counter

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode


def once(*keywords, others=0):
    """A module's input becomes a DTensor once, so its gradient is summed once for all readers;
    positional ones after the first are left as they are."""
    whole = Replicate()
    if keywords:
        given = dict.fromkeys(keywords, whole)
        return PrepareModuleInput(
            input_kwarg_layouts=given, desired_input_kwarg_layouts=given, use_local_output=False
        )
    layouts = (whole, *[None] * others)
    return PrepareModuleInput(
        input_layouts=layouts, desired_input_layouts=layouts, use_local_output=False
    )


def gathered():
    return ColwiseParallel(output_layouts=Replicate())


def cut_gpt(model, mesh):
    """For `tensor_models.GPT` without ties; heads are divided here."""
    for block in model.blocks:
        plan = {"attention": once(), "attention.wo": RowwiseParallel()}
        plan |= {f"attention.w{each}": ColwiseParallel() for each in "qkv"}
        plan |= {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
        block.attention.heads //= mesh.size()
        block.attention.pairs //= mesh.size()
    parallelize_module(model, mesh, {"embed": gathered(), "head": gathered()})


def cut_llama(model, mesh):
    """For Llama of transformers."""
    for layer in model.model.layers:
        plan = {"self_attn": once("hidden_states"), "self_attn.o_proj": RowwiseParallel()}
        plan |= {f"self_attn.{each}_proj": ColwiseParallel() for each in "qkv"}
        plan |= {"mlp": once(), "mlp.down_proj": RowwiseParallel()}
        plan |= {f"mlp.{each}_proj": ColwiseParallel() for each in ("gate", "up")}
        parallelize_module(layer, mesh, plan)
    parallelize_module(model, mesh, {"model.embed_tokens": gathered(), "lm_head": gathered()})


def cut_bert(model, mesh):
    """For BERT of transformers, whose output layer has the weight of the embedding."""
    words, head = model.bert.embeddings, model.cls.predictions
    for layer in model.bert.encoder.layer:
        plan = {"attention.self": once(), "attention.output.dense": RowwiseParallel()}
        plan |= {f"attention.self.{each}": ColwiseParallel() for each in ("query", "key", "value")}
        plan |= {"intermediate.dense": ColwiseParallel(), "output.dense": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)
    by_rows = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(words, mesh, {"word_embeddings": by_rows})
    parallelize_module(head, mesh, {"decoder": gathered()})
    head.decoder.weight = words.word_embeddings.weight


def cut_vit(model, mesh):
    """For ViT of transformers."""
    for layer in model.vit.layers:
        plan = {"attention": once(others=1), "attention.o_proj": RowwiseParallel()}
        plan |= {f"attention.{each}_proj": ColwiseParallel() for each in "qkv"}
        plan |= {"mlp.fc1": ColwiseParallel(), "mlp.fc2": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)


class Sent(TorchDispatchMode):
    """Counts collectives and messages, and the bytes that each rank sends; in a ring."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.calls, self.bytes = ranks, Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and "wait" not in name and "wrap" not in name:
            kind = "all_gather" if "gather" in name else "all_reduce"
            if name == "send":
                self.calls["send"] += 1
                self.bytes += sum(each.numel() * each.element_size() for each in args[0])
            if name in ("send", "recv_"):
                return made
            if name == "alltoall_base_":
                self.calls["all_to_all"] += 1
                parts = args[1].numel() * args[1].element_size()
                even = not args[3]  # else none to itself
                self.bytes += parts * (self.ranks - 1) // self.ranks if even else parts
                return made
            assert kind == "all_gather" or name in ("allreduce_", "all_reduce"), name
            self.calls[kind] += 1
            tensor = made if isinstance(made, torch.Tensor) else args[0]
            while not isinstance(tensor, torch.Tensor):
                tensor = torch.stack(list(tensor)) if len(tensor) > 1 else tensor[0]
            share = tensor.numel() * tensor.element_size() * (self.ranks - 1) // self.ranks
            self.bytes += share * (2 if kind == "all_reduce" else 1)
        return made
