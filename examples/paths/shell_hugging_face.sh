#!/usr/bin/env bash
# The shell only, on a Hugging Face folder: each line of the text is a sentence, a tab and the number of its class.
# bash examples/paths/shell_hugging_face.sh, in a folder with bert/, train.txt and new.txt
set -euo pipefail

sipp compare --model hf:bert --part logits --data train.txt --keeps 0.5 --methods sipp-blend,magnitude,snip --repair
sipp prune --model hf:bert --part logits --data train.txt --holdout new.txt --keep 0.5 --repair --out sparse
sipp eval --model hf:bert --part logits --dense bert/model.safetensors --pruned sparse --data new.txt --out sparse/eval.json
sipp bench sparse --model hf:bert --data new.txt --out sparse/bench.json
sipp report sparse -o page.html
sipp export sparse --model hf:bert --out sparse-bert
