"""Any data and any model in, checked batches and the patches that each weight meets out."""
