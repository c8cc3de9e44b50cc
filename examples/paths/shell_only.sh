#!/usr/bin/env bash
# The shell only: a network that my.py builds, its weights, inputs in files; then a small file, a certificate and a page.
# bash examples/paths/shell_only.sh, in a folder with my.py, my.pt, points.npz and new.npz
set -euo pipefail

sipp compare --model my:net --weights my.pt --data points.npz --keeps 0.5,0.3 --repair
sipp prune --model my:net --weights my.pt --data points.npz --holdout new.npz --keep 0.3 --repair --out sparse
sipp eval --model my:net --dense my.pt --pruned sparse --data new.npz --out sparse/eval.json
sipp certify --model my:net --dense my.pt --pruned sparse --holdout new.npz --accuracy --out sparse/accuracy.json
sipp bench sparse --model my:net --data new.npz --out sparse/bench.json
sipp report sparse -o page.html
sipp export sparse --model my:net --out small.safetensors
sipp inspect small.safetensors
sipp export small.safetensors --model my:net --data new.npz --out small.onnx
