"""One score for every prunable weight: sensitivities (T1-T4) and the scores of other papers."""
