"""How often claims about a language model's sequences are false: simulated, beside claims that count tokens as points.

    python benchmarks/bench_sequence_claims.py [N_TRIALS]

Documents have topics, so that tokens of one document are alike. A tiny Llama is pruned, and each trial certifies it on
60 new documents by KL and by next tokens (T22). A claim is false if more than that share of 20,000 other documents are
further off than it says, by more than chance. `by tokens` counts every token as a point: it must be false too often.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sipp
from sipp.certificates.claims import certified_epsilon
from sipp.certificates.measures import measure_of
from sipp.inputs.data import data_of

N_TOPICS, LENGTH, N, N_TRUTH, SHARE, BETA = 16, 24, 60, 20_000, 0.12, 0.1
N_WORDS = 8  # of a topic


def documents(n: int, seed: int) -> torch.Tensor:
    """Sequences of words of one topic each."""
    generator = torch.Generator().manual_seed(seed)
    topics = torch.randint(0, N_TOPICS, (n, 1), generator=generator)
    return topics * N_WORDS + torch.randint(0, N_WORDS, (n, LENGTH), generator=generator)


@torch.no_grad()
def changes(dense: torch.nn.Module, pruned: torch.nn.Module, ids: torch.Tensor, measure: str) -> torch.Tensor:
    """What is measured of each document."""
    found = []
    for batch in data_of(list(ids.split(500))).batches():
        f, g = (net(*batch.args).logits for net in (dense, pruned))
        found.append(measure_of(measure)(f, g, batch))  # type: ignore[arg-type]
    return torch.cat(found)


def main(n_trials: int) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=N_TOPICS * N_WORDS, max_position_embeddings=LENGTH, use_cache=False, **sizes)
    dense = LlamaForCausalLM(config).eval()
    optimizer = torch.optim.AdamW(dense.parameters(), lr=3e-3)
    for step in range(60):  # it learns the topics: what pruning breaks differs from one to the next
        ids = documents(64, 10**6 + step)
        dense(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pruned = sipp.prune(dense, documents(40, 1), keep=0.4, method="magnitude", statements=False, progress=False).model
    print(f"{n_trials} trials of {N} documents, share {SHARE}, nominal false rate {BETA:.0%}")
    for measure in ("kl", "next-token"):
        truth = changes(dense, pruned, documents(N_TRUTH, 2), measure)
        # by three standard deviations of the truth's own estimate: what is counted as false is false
        most = SHARE + 3 * (SHARE * (1 - SHARE) / N_TRUTH) ** 0.5
        false = by_tokens = 0
        for trial in range(n_trials):
            ids = documents(N, 100 + trial)
            said = {"measure": measure, "share": SHARE, "confidence": 1 - BETA, "progress": False}
            epsilon = sipp.certify(dense, pruned, ids, **said).epsilon
            values = changes(dense, pruned, ids, measure).repeat_interleave(LENGTH)
            broken = float(certified_epsilon(values, SHARE, BETA, n=N * LENGTH))
            false += float((truth > epsilon).double().mean()) > most
            by_tokens += float((truth > broken).double().mean()) > most
        print(f"{measure}: {false / n_trials:.1%} false; by tokens {by_tokens / n_trials:.1%}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
