#!/usr/bin/env bash
# The shell only, without a line of code: weights of a built-in network, fine-tuned to two classes, and images in one
# folder for each class.
# bash examples/paths/shell_images.sh, in a folder with pets.pt, pets/CLASS/*.png and new-pets/CLASS/*.png
set -euo pipefail

sipp prune --model resnet20 --weights pets.pt --data pets --size 16 --points 40 --holdout new-pets --keep 0.6 --out sparse
sipp eval --model resnet20 --dense pets.pt --pruned sparse --data new-pets --size 16 --out sparse/eval.json
sipp report sparse -o page.html
