"""Batch normalisation over the global batch, at any number of workers.

`make_global` turns a model's layers into ones that ask the other workers for their statistics in
the forward pass, and for their gradients in the backward pass (`reads.py`; Ioffe and Szegedy
2015, arXiv:1502.03167). Outputs, gradients and running statistics are those of one pass over the
whole batch. Outside a training pass, and in evaluation mode, a layer computes as torch's does.

A worker's variance is taken around its own mean, and those of all are joined around the mean of
all (Chan et al. 1983), in float64: nothing cancels where means are large.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from instep.errors import RecipeError
from instep.parallel.global_batch.reads import Reads


def make_global(model: nn.Module) -> Reads | None:
    """Make every layer of batch normalisation see the global batch, in place.

    The layers stay the same objects, with their parameters, buffers and hooks.

    Returns:
        The reads of its passes; None if the model has no such layer.

    Raises:
        RecipeError: a layer has a `forward` of its own.
    """
    layers: dict[str, Any] = {
        name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)
    }
    for name, layer in layers.items():
        known = (_BatchNorm.forward, nn.SyncBatchNorm.forward, _Global.forward)
        if type(layer).forward not in known:
            raise RecipeError(
                f"the layer {name!r} is a {type(layer).__name__}, which normalises batches in a "
                "forward() of its own: train.batch_norm = 'global' knows torch's nn.BatchNorm1d, "
                "2d, 3d and nn.SyncBatchNorm. Use one of them, or leave train.batch_norm out."
            )
    if not layers:
        return None
    reads = Reads(list(layers), 1 + 2 * max(layer.num_features for layer in layers.values()))
    for place, layer in enumerate(layers.values()):
        layer.__class__ = _global_kind(type(layer))
        layer._reads, layer._place = reads, place
    return reads


def use_running_statistics(model: nn.Module) -> None:
    """Have the layers of a copy normalise by their running statistics, from now on.

    They then treat each sample separately, so a trial shows what else looks at the batch.
    """
    for layer in model.modules():
        if isinstance(layer, _Global):
            layer._fixed = True


class _Global(_BatchNorm):
    """The class that a layer of torch's gets in addition to its own."""

    _reads: Reads
    _place: int
    _fixed = False

    def forward(self, given: Tensor) -> Tensor:
        """As torch's, with the statistics of the global batch where it would use the batch's."""
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        if self._fixed and by_batch:
            return self._by_running(given)
        reads = self._reads
        if not (by_batch and reads.active) or (reads.size == 1 and reads.counts):
            output = _BatchNorm.forward(self, given)
        else:
            self._check_input_dim(given)  # type: ignore[no-untyped-call]
            output = _Normalise.apply(  # type: ignore[no-untyped-call]
                given, self.weight, self.bias, self
            )
        if by_batch and reads.active:
            reads.made(output)
        return output

    def _by_running(self, given: Tensor) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        if mean is None or variance is None:
            mean, variance = given.new_zeros(given.shape[1]), given.new_ones(given.shape[1])
        return functional.batch_norm(
            given, mean, variance, self.weight, self.bias, False, 0.0, self.eps
        )

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics as torch does: by the unbiased variance."""
        if not (self.training and self.track_running_stats):
            return
        factor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        for running, now in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None:
                running.copy_((1 - factor) * running.double() + factor * now)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor | None, bias: Tensor | None, layer: _Global
    ) -> Tensor:
        wide = _wide(given)
        rows = layer._reads.ask(layer._place, _statistics(wide), backward=False)
        counts, (means, variances) = rows[:, :1], rows[:, 1:].chunk(2, dim=1)
        count = float(counts.sum())
        if count == 1 and layer._reads.failed is None:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{given.size()}"
            )
        count = max(count, 1.0)  # there may be none, where no sample could be read
        mean = (counts * means).sum(0) / count
        squares = (counts * (variances + (means - mean).square())).sum(0)
        if layer._reads.counts:
            layer._follow(mean, squares / (count - 1))
        mean, variance = mean.to(wide.dtype), (squares / count).to(wide.dtype)
        scale, shift = (None if p is None else p.to(wide.dtype) for p in (weight, bias))
        output = functional.batch_norm(wide, mean, variance, scale, shift, False, 0.0, layer.eps)
        ctx.save_for_backward(given, weight, mean, variance)
        ctx.layer, ctx.count, ctx.counts = layer, count, layer._reads.counts
        ctx.bias = None if bias is None else bias.dtype
        return output.to(given.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer = ctx.layer
        if torch.is_grad_enabled() or not layer._reads.goes_back:
            raise layer._reads.no_second(layer._place)
        given, weight, mean, variance = ctx.saved_tensors
        wide, gradient = _wide(given), _wide(gradient)
        scale = None if weight is None else weight.to(wide.dtype)
        # as if the statistics were constants; with it come the two sums
        local, by_scale, by_shift = torch.ops.aten.native_batch_norm_backward(
            gradient, wide, scale, mean, variance, None, None, False, layer.eps, [True, True, True]
        )
        own = torch.cat([by_shift, by_scale]).double()
        by_mean, by_spread = layer._reads.ask(layer._place, own, backward=True).sum(0).chunk(2)
        if not ctx.counts:
            for mine in (local, by_scale, by_shift):
                mine.zero_()
        else:
            narrow = (variance.double() + layer.eps).rsqrt()
            slope = narrow if scale is None else narrow * scale
            by_mean, by_spread = slope * by_mean / ctx.count, slope * narrow * by_spread / ctx.count
            local -= (wide - _along(mean, wide)) * _along(by_spread, wide) + _along(by_mean, wide)
        return (
            local.to(given.dtype),
            None if weight is None else by_scale.to(weight.dtype),
            None if ctx.bias is None else by_shift.to(ctx.bias),
            None,
        )


def _statistics(wide: Tensor) -> Tensor:
    """[1 + 2 * channels] float64: values per channel, their means, and their variances."""
    count, channels = wide.numel() // wide.shape[1], wide.shape[1]
    if not count:
        return torch.zeros(1 + 2 * channels, dtype=torch.float64, device=wide.device)
    mean, variance = torch.batch_norm_update_stats(wide, None, None, 0.0)
    # the mean is rounded as its type is; what that leaves over is small, and can be summed in it
    others = [dim for dim in range(wide.dim()) if dim != 1]
    left = (wide - _along(mean, wide)).sum(others)
    means = mean.double() + left.double() / count
    return torch.cat([means.new_full((1,), count), means, variance.double()])


def _along(values: Tensor, like: Tensor) -> Tensor:
    """[channels] so that it meets the channels of `like`, in its type."""
    return values.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


_KINDS: dict[type[nn.Module], type[nn.Module]] = {}


def _global_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of such layers that sees the global batch; still one of theirs."""
    if issubclass(kind, _Global):
        return kind
    if kind not in _KINDS:
        named = {"__module__": __name__, "__qualname__": f"Global{kind.__name__}"}
        _KINDS[kind] = type(kind.__name__, (_Global, kind), named)  # the user's name, for messages
    return _KINDS[kind]


# pickle finds the classes by these qualified names
GlobalBatchNorm1d = _global_kind(nn.BatchNorm1d)
GlobalBatchNorm2d = _global_kind(nn.BatchNorm2d)
GlobalBatchNorm3d = _global_kind(nn.BatchNorm3d)
GlobalSyncBatchNorm = _global_kind(nn.SyncBatchNorm)
