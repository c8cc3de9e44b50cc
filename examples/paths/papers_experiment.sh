#!/usr/bin/env bash
# The paper's experiment: train, prune and retrain level by level, with several methods; stop and resume with the same
# command; write a page.
# bash examples/paths/papers_experiment.sh
set -euo pipefail

sipp run digits-iterative --show
sipp study paper-fully-connected --dry-run
sipp run digits-iterative --set "prune.methods=[sipp-det, magnitude]" --set "prune.keeps=[0.2]" --out runs
sipp run digits-iterative --set "prune.methods=[sipp-det, magnitude]" --set "prune.keeps=[0.2]" --out runs
sipp run --status --out runs
sipp report runs -o page.html
