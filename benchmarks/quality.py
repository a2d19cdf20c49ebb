"""What a number format costs in quality: each dtype against float32 on the same file and the same text.

`python -m benchmarks.quality [--model NAME] [--quick] [--json FILE]`. The text is this repository's own prose.
Perplexity is exp of the mean negative log-likelihood; KL is the mean divergence of the next-token distribution from
float32's.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import ROOT, Report, Row
from engine.backends.cpu import DType
from engine.batch import BLOCK_TOKENS, FlatBatch
from engine.catalog import pull
from engine.runner import load
from engine.tokenizer import load_tokenizer

PACKAGES = ("farthing", "torch", "gguf")
TEXTS = ("README.md", "CONTRIBUTING.md")
REFERENCE: DType = "float32"
OTHERS: tuple[DType, ...] = ("bfloat16", "int8")


def log_probabilities(path: Path, dtype: DType, tokens: list[int], chunk: int = 256) -> Tensor:
    """[tokens, vocab] float32 log-probabilities of what follows each token, computed in chunks over the paged KV."""
    runner = load(path, dtype)
    blocks = -(-len(tokens) // BLOCK_TOKENS)
    runner.allocate(blocks)
    parts = []
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        places = torch.arange(start, end)
        batch = FlatBatch(
            token_ids=torch.tensor(tokens[start:end]),
            positions=places,
            slot_mapping=places,
            query_starts=(0, end - start),
            context_lens=(end,),
            block_tables=torch.arange(blocks, dtype=torch.int32)[None],
            logits_rows=torch.arange(end - start),
        )
        parts.append(runner.forward(batch).log_softmax(-1))
    return torch.cat(parts)


def perplexity(scores: Tensor, tokens: list[int]) -> float:
    following = torch.tensor(tokens[1:])
    return float(scores[:-1].gather(1, following[:, None]).mean().neg().exp())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a name from the catalogue")
    parser.add_argument("--quick", action="store_true", help="256 tokens instead of 1,024")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there instead of printing them")
    options = parser.parse_args()
    path = pull(options.model)
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)
    tokens = load_tokenizer(path).encode(text, add_special=True)[: 256 if options.quick else 1024]
    workload = f"{len(tokens)} tokens of prose"
    report = Report()
    reference = log_probabilities(path, REFERENCE, tokens)
    base = perplexity(reference, tokens)
    report.rows.append(Row.of(workload, REFERENCE, "perplexity", [base], ""))
    for dtype in OTHERS:
        scores = log_probabilities(path, dtype, tokens)
        divergence = float((reference.exp() * (reference - scores)).sum(-1).mean())
        same = float((reference.argmax(-1) == scores.argmax(-1)).float().mean())
        report.rows += [
            Row.of(workload, dtype, "perplexity", [perplexity(scores, tokens)], ""),
            Row.of(workload, dtype, "KL from float32", [divergence * 1e3], "millinats"),
            Row.of(workload, dtype, "same best token", [same * 100], "%"),
        ]
        report.ratios[f"perplexity_{dtype}"] = perplexity(scores, tokens) / base
    report.notes.append(f"model {options.model}; a ratio of 1.01 is 1% more perplexity than float32")
    report.emit(options.json, PACKAGES)


if __name__ == "__main__":
    main()
