"""`perplexity`: measures how well a language model predicts a text, and how far it is from the dense model.

It follows the usual protocol: the text is tokenised as a whole and cut into windows that do not overlap (`sipp.text`
with `apart=False`). Each window is predicted from its own first token, and the losses of all predicted tokens are
averaged.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn

from sipp.certificates import Output, check_model, model_output, token_sums
from sipp.errors import DataError
from sipp.inputs import AnyData, data_of, hash_of_points, scoring_mode
from sipp.progress import progress_bar
from sipp.results import NetworkLike, TextScores, check, hashing, network_of, numerics


@torch.inference_mode(False)
def perplexity(
    model: NetworkLike, data: AnyData, *, dense: nn.Module | None = None, output: Output = None, progress: bool = True
) -> TextScores:
    """Measures how well a causal language model predicts windows of token numbers, and how far it is from `dense`.

    `data` holds windows from `sipp.text(..., apart=False)` (n x tokens), or batches of these; positions that an
    `attention_mask` marks as padding are not counted. `output` picks the logits (n x tokens x vocabulary) if the model
    returns several tensors. Windows are run one at a time, whatever the batches, because logits are large.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))  # predicts the next of 9 tokens
        >>> windows = torch.randint(0, 9, (20, 32))
        >>> scores = sipp.perplexity(sipp.prune(net, windows, keep=0.5), windows, dense=net)
        >>> scores.n_tokens, scores.perplexity > 5, scores.same_token > 0.3
        (620, True, True)
    """
    network = network_of(model)
    networks = [network] if dense is None else [network, dense]
    for role, net in zip(("given", "dense"), networks):
        check_model(role, net)
    windows = data_of(data, role="text", device=numerics.device_of(network))
    longest, hashes = 0, list[str]()
    sums = torch.zeros(5, dtype=torch.float64, device="cpu")
    with ExitStack() as stack:
        for net in networks:
            stack.enter_context(scoring_mode(net, "running"))
        bar = progress_bar("measuring", windows.n_points_known, shown=check.flag("progress", progress))
        advance = stack.enter_context(bar)
        for batch in windows.batches():
            hashes += batch.hashes()
            for i in range(batch.n_points):
                window = batch.at(slice(i, i + 1))
                of_window, length = token_sums([model_output(net, window, output) for net in networks], window)
                sums, longest = sums + of_window, max(longest, length)
                advance(1)
    n, loss, dense_loss, kl, same = sums.tolist()
    if n == 0:
        raise DataError("no token is predicted: windows of one token have no next one", fix="give longer windows")
    return TextScores(
        n_windows=len(hashes),
        window=longest,
        n_tokens=int(n),
        loss=loss / n,
        dense_loss=None if dense is None else dense_loss / n,
        kl=None if dense is None else kl / n,
        same_token=None if dense is None else same / n,
        data_hash=hash_of_points(hashes),
        dense_hash="" if dense is None else hashing.of_model(dense),
        pruned_hash=hashing.of_model(network),
    )
