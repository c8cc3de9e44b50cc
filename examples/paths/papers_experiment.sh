#!/usr/bin/env bash
# The paper's experiment: train, prune and retrain level by level, with several methods; stop and resume with the same
# command; add one more method without training the others again; write a page and figures.
# bash examples/paths/papers_experiment.sh
set -euo pipefail

sipp recipes show digits-iterative
sipp study paper-iterative --full --dry-run
sipp run digits-iterative --set "prune.methods=[sipp-det, magnitude]" --set "prune.keeps=[0.2]" --out runs
sipp run digits-iterative --set "prune.methods=[sipp-det, magnitude, snip]" --set "prune.keeps=[0.2]" --out runs
sipp runs --out runs
sipp report runs -o page.html --figures figures
