"""Studies: named sets of recipes, each reproducing a figure of the paper. One YAML file each."""

from sipp_lab.studies.catalog import Form, Study, load_study, study_descriptions, study_names

__all__ = ["Form", "Study", "load_study", "study_descriptions", "study_names"]
