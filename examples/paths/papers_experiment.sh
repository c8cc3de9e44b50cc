#!/usr/bin/env bash
# The paper's experiment: train, prune and retrain level by level, by several methods; stopped and resumed by the same
# command; one method more without training again; a page and figures.
# bash examples/paths/papers_experiment.sh
set -euo pipefail

sipp recipes show digits-iterative
sipp study paper-iterative --full --dry-run
sipp run digits-iterative --set "prune.methods=[sipp-det, wt]" --set "prune.keeps=[0.2]" --out runs
sipp run digits-iterative --set "prune.methods=[sipp-det, wt, snip]" --set "prune.keeps=[0.2]" --out runs
sipp runs --out runs
sipp report runs -o page.html --figures figures
