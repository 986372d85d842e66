"""Drawing a token id from scores, in torch: what a GPU's kernel must come to."""

import torch
from torch import Tensor


@torch.library.custom_op("sirchat_tests::draw", mutates_args=())  # one operation in a record
def draw(
    scores: Tensor,
    values: Tensor,
    ids: Tensor,
    number: Tensor,
    top_k: int,
    top_p: float,
    min_p: float,
    around: float,
) -> tuple[Tensor, Tensor]:
    """What `kernels.draw_token` returns: an id, int64 [1], and whether it is right, bool [1]."""
    count = len(values)
    chances = (values.double() - values[0]).exp()  # relative to the likeliest
    total = (scores.double() - values[0]).exp().sum()
    few = many = torch.tensor([count], device=ids.device)
    if top_k:
        few = many = (values >= values[min(top_k, count) - 1]).sum(0, keepdim=True)
        total = chances[: int(few)].sum()
    likelier = (chances.cumsum(0) - chances) / total
    for lower, upper in (
        (likelier < top_p - around, likelier < top_p + around),
        (chances >= min_p * (1 + around), chances >= min_p * (1 - around)),
    ):
        few, many = few.minimum(lower.sum()), many.minimum(upper.sum())
    left = int(few)
    is_whole = left == count == len(scores)
    is_told = is_whole or (left < count and bool(values[left] < values[left - 1]))
    order = ids[:left].sort()  # the host draws in order of id
    heights = chances[:left][order.indices].cumsum(0)
    drawn = int((heights <= number * heights[-1]).sum()) if left else 0
    chosen = order.values[min(drawn, left - 1)] if left else ids[0]
    return chosen.view(1).clone(), (few == many) & (few > 0) & is_told
