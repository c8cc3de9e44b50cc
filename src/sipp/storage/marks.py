"""The names and marks by which files that this package wrote are known again."""

from typing import Final, Literal

RECORD_NAME = "report.json"  # what `sipp prune` calls its record,
WEIGHTS_NAME = "model.safetensors"  # and the network
RECORD_KEY = "sipp record"  # in the header of the network, which holds its record too
FILE_SUFFIX = ".safetensors"  # of a network that is one file
Precision = Literal["fp32", "lossless", "fp16", "bf16", "int8"]  # of the values in such a file
BENCH_NAME = "bench.json"  # what `sipp bench` found out about a network, beside it
BENCH_KIND: Final = "file bench"  # in that record
BENCH_FORMAT = 1
EVAL_KIND, EVAL_FORMAT = "evaluation", 1  # in what `sipp eval --out` writes
RECORD_KIND, RECORD_FORMAT = "pruned", 2  # in that record
SCORES_MARK = {"sipp": "scores"}  # in the header of a file of scores
PAGE_MARK = '<meta name="generator" content="sipp report">'  # in the head of a page
FIGURE_MARK = "sipp report"  # who made it, in a figure's own words
