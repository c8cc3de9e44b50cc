"""The laboratory: networks, data and recipes of the paper, and runs of them that can be stopped and resumed.

It uses `sipp` as anyone does: public names only (`tests/lab/test_public_names_only.py`). The files to read, in the
order of `sipp run`:

    recipes/load.py     the recipe: a row of table.py, with the settings over it, checked by schema.py
    runs/running.py     its data (data/feed.py), its folder and lock (runs/folder.py), each network that is missing
    runs/stages.py      one network: its parent, what the pipeline makes of it, training, checkpoints, its record
    pipelines.py        which network is the parent, and `sipp.prune` to the budget of the level
    training.py         epochs and steps
    page/results.py     runs and studies as a page

`processes.py` has what several processes do together, `runs/on_ray.py` trains several networks at once.
"""
