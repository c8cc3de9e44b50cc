"""A model and data in, one number for every prunable weight out: sensitivities (T1-T4) and what others prune by."""
