"""The laboratory: networks, data and recipes of the paper, and runs of them that can be stopped and resumed.

It uses `sipp` as anyone does: public names only (`tests/lab/test_public_names_only.py`).

    recipes + studies -> runs: pipelines (sipp.prune) + training -> records -> page
    what to run          stage by stage, in this process, in several, or on Ray
"""
