# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of one section (query rows x key rows) by cuDNN as torch has it, and the merge.

Tensors of a section are [B, H, S, D] of any strides. On the CPU (for a dry run) it is torch's
kernel there.
"""

import torch

import sections

_ATEN = torch.ops.aten


def _cudnn(q, k, v, causal):
    found = _ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    return found[0], found[1].reshape(q.shape[:3])  # lse is [B, H, S] or [B, H, S, 1]


def _cudnn_expanded(q, k, v, causal):
    group = q.shape[1] // k.shape[1]
    return _cudnn(q, *(t.repeat_interleave(group, 1) for t in (k, v)), causal)


class Sections:
    """(o, lse) of q, k, v. A causal section is square.

    gqa: "native" where the kernel takes fewer key heads than query heads and is right with them,
    else "expanded": K and V are repeated for it in every call.
    """

    def __init__(self, device, dtype):
        self.is_cpu = device.type == "cpu"
        self.gqa = "native" if self.is_cpu or self._is_native(device, dtype) else "expanded"

    def _is_native(self, device, dtype):
        generator = torch.Generator(device).manual_seed(3)
        q, k, v = (torch.randn(1, h, 256, 128, device=device, dtype=dtype, generator=generator)
                   for h in (4, 2, 2))
        try:
            pairs = zip(_cudnn(q, k, v, True), _cudnn_expanded(q, k, v, True))
            return all(torch.allclose(a.float(), b.float(), atol=2e-2) for a, b in pairs)
        except RuntimeError:
            return False

    def __call__(self, q, k, v, causal):
        if self.is_cpu:
            return sections.forward(q, k, v, causal)
        if q.shape[1] != k.shape[1] and self.gqa == "expanded":
            return _cudnn_expanded(q, k, v, causal)
        return _cudnn(q, k, v, causal)


def merge(o, lse, o_more, lse_more):
    """Merges o [B, H, S, D], in its own type, and lse in place with those of more keys."""
    weight = torch.sigmoid(lse_more - lse)
    o.copy_(torch.lerp(o.float(), o_more.float(), weight[..., None]))
    lse.copy_(torch.logaddexp(lse, lse_more))


# One kernel for all sizes: a compilation takes seconds. Layouts are told apart all the same; beyond
# the limit merges would be what `merge` is, unnoticed.
torch._dynamo.config.recompile_limit = 64
torch._dynamo.config.fail_on_recompile_limit_hit = True
compiled_merge = torch.compile(merge, dynamic=True)


def check_merge(how, device, dtype):
    """Raises where this merge, which may have to be compiled, does not do its work."""
    o, more = (torch.full((1, 2, 64, 32), x, device=device, dtype=dtype) for x in (1.0, 3.0))
    lse, lse_more = (torch.zeros(1, 2, 64, device=device) for _ in range(2))
    how(o, lse, more, lse_more)
    if not (torch.all(o == 2) and torch.allclose(lse, torch.full_like(lse, 0.6931472))):
        raise RuntimeError("merge: wrong results")
